/* Between the two files of the entropy coder. */
#ifndef PRFAAS_RANS_H
#define PRFAAS_RANS_H

#include <stddef.h>
#include <stdint.h>

enum { RANS_LANES = 32, RANS_BITS = 12, RANS_TOTAL = 1 << RANS_BITS };
#define RANS_LOWEST 65536u

/* Whether this CPU, and this build, has AVX2 or AVX-512; without it the functions below are not
 * called. With AVX-512 there is AVX2. */
int rans_avx2(void);
int rans_avx512(void);

/* Symbols of `rows` rows, a multiple of 8 (of RANS_LANES), the last first; words go below `*words`, and
 * up to 32 bytes below those are overwritten. The first row is that of the first state. */
void rans_put_avx2(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                   uint8_t **words);
void rans_put_avx512(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                     uint8_t **words);

/* Symbols of the first rows to `s`, as many eights (RANS_LANES) as there are words for certain; how
 * many rows. */
size_t rans_get_avx2(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                     const uint8_t **words, const uint8_t *end);
size_t rans_get_avx512(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                       const uint8_t **words, const uint8_t *end);

#endif

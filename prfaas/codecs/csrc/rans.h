/* Between the two files of the entropy coder. */
#ifndef PRFAAS_RANS_H
#define PRFAAS_RANS_H

#include <stddef.h>
#include <stdint.h>

enum { RANS_LANES = 32, RANS_BITS = 12, RANS_TOTAL = 1 << RANS_BITS };
#define RANS_LOWEST 65536u

/* Whether this CPU, and this build, has AVX2; without it the functions below are not called. */
int rans_avx2(void);

/* Symbols of `rows` rows, a multiple of 8, the last first; words go below `*words`, and up to 16 bytes
 * below those are overwritten. */
void rans_put_avx2(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                   uint8_t **words);

/* Symbols of the first rows to `s`, as many eights as there are words for certain; how many rows. */
size_t rans_get_avx2(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                     const uint8_t **words, const uint8_t *end);

#endif

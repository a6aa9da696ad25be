/* Shared by the codec sources. Every function gets sizes that module.c has checked against the
 * buffers, holds no state but constant tables, and runs without the GIL. */
#ifndef PRFAAS_NATIVE_H
#define PRFAAS_NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Loops worth compiling twice: once for any x86-64, once for AVX2 and FMA; the loader picks. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) \
    && __GNUC__ >= 12
#define CLONES target_clones("arch=x86-64-v3", "default")
#define WIDE __attribute__((CLONES, optimize("O3")))
#define PRODUCTS __attribute__((CLONES, optimize("O3", "fp-contract=fast")))
#else
#define WIDE
#define PRODUCTS
#endif
/* Everything is compiled with -ffp-contract=off, so that any CPU, and torch on a GPU, gets the same
 * bits; only products with a basis may add without rounding in between, where the CPU can. */

#define CORRUPT (-2)   /* hostile or damaged input */
#define NO_GAIN (-1)   /* the result would not be smaller, or the input is not finite */

/* exponent.c: lossless. Rows of `cols` items of 2 or 4 bytes. */
ptrdiff_t exponent_encode(const uint8_t *src, size_t rows, size_t cols, size_t item, uint8_t *dst,
                          size_t room, uint8_t *scratch);
int exponent_decode(const uint8_t *src, size_t size, size_t rows, size_t cols, size_t item,
                    uint8_t *dst, uint8_t *scratch);

/* rans.c: int16 columns, [cols][rows]. */
void rans_setup(void); /* once, before anything else */
int rans_level(int most); /* use no more than 0: any CPU, 1: AVX2, 2: AVX-512; what is used */
size_t rans_bound(size_t rows, size_t cols);
ptrdiff_t rans_encode(const int16_t *q, size_t rows, size_t cols, uint8_t *dst, size_t room,
                      uint8_t *scratch);
int rans_decode(const uint8_t *src, size_t size, size_t rows, size_t cols, int16_t *q,
                uint8_t *scratch);

/* transform.c: float32 rows of values, and their quantised columns. */
enum { BLOCK = 32 };
int load_rows(const uint8_t *src, size_t rows, size_t heads, size_t dim, size_t kind,
              const float *turns, const float *mean, float *x, size_t stride);
void store_rows(const float *x, size_t stride, size_t rows, size_t heads, size_t dim, size_t kind,
                const float *turns, const float *mean, uint8_t *dst);
int forward(const float *x, size_t rows, size_t width, const float *basis, size_t cols,
            float scale, float dead, int16_t *q);
void inverse(const int16_t *q, size_t rows, size_t cols, const float *basis, size_t depth,
             size_t width, float step, float *x, float *scratch);
int quantise(const float *x, size_t rows, size_t cols, const float *scale, float dead, int16_t *q);
void unpack(const uint8_t *src, size_t n, int16_t *q);
void restore(const int16_t *q, size_t rows, size_t heads, size_t dim, size_t kind, const float *step,
             const float *turns, const float *mean, uint8_t *dst, float *x);

/* int8.c: K per channel over 64 tokens, V per token and head; bfloat16 only. */
int int8_encode(const uint8_t *src, size_t rows, size_t heads, size_t dim, uint8_t *dst);
void int8_decode(const uint8_t *src, size_t rows, size_t heads, size_t dim, uint8_t *dst);
size_t int8_size(size_t rows, size_t heads, size_t dim);

#endif

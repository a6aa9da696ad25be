/* Round trips and hostile input for the codecs' C files, to be built with sanitizers:
 * every buffer is its own allocation of the very size, so one byte outside is found. */
#include <stdio.h>
#include <stdlib.h>

#include "native.h"

static uint64_t state;
/* Digest of what the entropy coder has made: the same whatever it was built for. */
static uint64_t made = 14695981039346656037u;

static uint32_t draw(uint32_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % n;
}

static void fail(const char *what)
{
    printf("%s\n", what);
    exit(1);
}

static uint8_t *exact(const uint8_t *from, size_t n)
{
    uint8_t *p = malloc(n ? n : 1);
    memcpy(p, from, n);
    return p;
}

/* A copy of `good` with some bytes changed, cut or added; its size to `size`. */
static uint8_t *damaged(const uint8_t *good, size_t n, size_t *size)
{
    size_t extra = draw(8) ? 0 : draw(64), m = n + extra;
    uint8_t *bad = malloc(m + 1);
    memcpy(bad, good, n);
    for (size_t i = n; i < m; i++)
        bad[i] = (uint8_t)draw(256);
    for (uint32_t i = draw(9); i && m; i--)
        bad[draw(draw(2) ? (uint32_t)m : (uint32_t)(m < 80 ? m : 80))] = (uint8_t)draw(256);
    if (!draw(4))
        m = draw((uint32_t)m + 1);
    *size = m;
    uint8_t *result = exact(bad, m);
    free(bad);
    return result;
}

static void exponents(void)
{
    size_t rows = 1 + draw(90), cols = 4 + draw(60), item = draw(2) ? 2 : 4, n = rows * cols;
    uint8_t *raw = malloc(n * item), *dst = malloc(n * item), *out = malloc(n * item);
    uint8_t *scratch = malloc(2 * n + 64);
    uint32_t spread = 1 + draw(40);
    for (size_t i = 0; i < n * item; i++)
        raw[i] = (uint8_t)(i % item == item - 1 ? 60 + draw(spread) : draw(256));
    ptrdiff_t size = exponent_encode(raw, rows, cols, item, dst, n * item, scratch);
    if (size > 0) {
        uint8_t *good = exact(dst, size);
        if (exponent_decode(good, size, rows, cols, item, out, scratch) || memcmp(raw, out, n * item))
            fail("exponent: not what it was");
        for (int i = 0; i < 20; i++) {
            size_t m;
            uint8_t *bad = damaged(good, size, &m);
            exponent_decode(bad, m, rows, cols, item, out, scratch);
            free(bad);
        }
        free(good);
    }
    free(raw); free(dst); free(out); free(scratch);
}

static void coefficients(void)
{
    size_t rows = 1 + draw(70), cols = 1 + draw(20), n = rows * cols, room = rans_bound(rows, cols);
    int16_t *q = malloc(n * 2), *out = malloc(n * 2);
    uint8_t *dst = malloc(room), *scratch = malloc((cols > 2 ? cols : 2) * rows + 64);
    uint32_t scale = 1 + draw(draw(2) ? 6 : 30000);
    for (size_t i = 0; i < n; i++)
        q[i] = (int16_t)((int)draw(scale) - (int)(scale / 2));
    if (!draw(3))
        q[draw((uint32_t)n)] = 30000;
    ptrdiff_t size = rans_encode(q, rows, cols, dst, room, scratch);
    if (size <= 0)
        fail("rans: does not encode");
    for (ptrdiff_t i = 0; i < size; i++)
        made = (made ^ dst[i]) * 1099511628211u;
    uint8_t *good = exact(dst, size);
    if (rans_decode(good, size, rows, cols, out, scratch) || memcmp(q, out, n * 2))
        fail("rans: not what it was");
    for (int i = 0; i < 20; i++) {
        size_t m;
        uint8_t *bad = damaged(good, size, &m);
        rans_decode(bad, m, rows, cols, out, scratch);
        free(bad);
    }
    free(q); free(out); free(dst); free(scratch); free(good);
}

static void numbers(void)
{
    size_t rows = 1 + draw(70), heads = 1 + draw(3), dim = 2 * (1 + draw(20)), width = heads * dim;
    size_t cols = 1 + draw(60), n = rows * width, kind = 1 + draw(2);
    uint8_t *raw = malloc(n * 2), *back = malloc(n * 2), *raw2 = malloc(n * 4), *out2 = malloc(n * 4);
    size_t size = int8_size(rows, heads, dim);
    uint8_t *small = malloc(size);
    float *x = malloc(n * 4), *turns = malloc(rows * dim * 4), *mean = malloc(width * 4);
    float *basis = malloc((cols + 15) / 16 * 16 * width * 4), *other = malloc((width + 15) / 16 * 16 * cols * 4);
    float *scratch = malloc(cols * 48 * 4), *scale = malloc(width * 4);
    float *scratch32 = malloc(width * BLOCK * 4);
    int16_t *q = malloc(rows * cols * 2), *q2 = malloc(n * 2);
    for (size_t i = 0; i < n * 2; i++)
        raw[i] = (uint8_t)draw(256);
    for (size_t i = 0; i < n * 4; i++)
        raw2[i] = (uint8_t)draw(256);
    for (size_t i = 0; i < rows * dim; i++)
        turns[i] = (float)draw(200) / 100 - 1;
    for (size_t i = 0; i < width; i++)
        mean[i] = (float)draw(20), scale[i] = (float)(1 + draw(1000)) / 100;
    for (size_t i = 0; i < (cols + 15) / 16 * 16 * width; i++)
        basis[i] = (float)draw(200) / 100 - 1;
    for (size_t i = 0; i < (width + 15) / 16 * 16 * cols; i++)
        other[i] = (float)draw(200) / 100 - 1;
    int8_encode(raw2, rows, heads, dim, small);
    int8_decode(small, rows, heads, dim, out2);
    for (size_t i = 0; i < size; i++)
        small[i] = (uint8_t)draw(256);
    int8_decode(small, rows, heads, dim, out2);
    load_rows(raw, rows, heads, dim, kind, draw(2) ? turns : NULL, mean, x, width);
    forward(x, rows, width, basis, cols, 1.0f, 0.5f, q);
    quantise(x, rows, width, scale, 0.5f, q2);
    for (size_t i = 0; i < rows * cols; i++)
        q[i] = (int16_t)draw(65536);
    inverse(q, rows, cols, other, cols, width, 0.1f, x, scratch);
    restore(q2, rows, heads, dim, kind, scale, draw(2) ? turns : NULL, mean, back, scratch32);
    store_rows(x, width, rows, heads, dim, kind, draw(2) ? turns : NULL, mean, back);
    free(raw); free(back); free(raw2); free(out2); free(small); free(x); free(turns); free(mean);
    free(basis); free(other); free(scratch); free(scale); free(q); free(q2);
    free(scratch32);
}

int main(int argc, char **argv)
{
    state = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    long rounds = argc > 2 ? strtol(argv[2], NULL, 10) : 1000;
    rans_setup();
    rans_level(argc > 3 ? atoi(argv[3]) : 0);
    for (long i = 0; i < rounds; i++) {
        exponents();
        coefficients();
        numbers();
    }
    printf("ok %llx\n", (unsigned long long)made);
    return 0;
}

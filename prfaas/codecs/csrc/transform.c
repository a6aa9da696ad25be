/* From items to quantised coefficients of a basis and back: unpacking, rotation, matrix products.
 *
 * A basis is packed in panels of 16 columns, [panel][row][16], padded with zeros, so that a panel is
 * read in order. Values are float32 rows; coefficients int16 columns, as the entropy coder has them. */
#include "native.h"

enum { PANEL = 16, TILE = 6, SOME = 64, F32 = 0, BF16 = 1, F16 = 2 };
#define LARGEST 30000.0f
#define TOO_LARGE 0x46EA6000u /* bits of 30000: larger ones, infinite ones and NaN are above */

static inline float from_bits(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
static inline uint32_t to_bits(float f) { uint32_t v; memcpy(&v, &f, 4); return v; }

static inline float half_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31)
        return from_bits(sign | 0x7F800000u | m << 13);
    if (e == 0) {
        float f = (float)m * (1.0f / 16777216.0f);
        return sign ? -f : f;
    }
    return from_bits(sign | (e + 112) << 23 | m << 13);
}

static inline uint16_t float_to_half(float f)
{
    uint32_t v = to_bits(f), sign = v >> 16 & 0x8000, a = v & 0x7FFFFFFF;
    if (a >= 0x477FF000u) /* rounds to infinity: the largest finite value is nearer to what was */
        return (uint16_t)(sign | 0x7BFF);
    if (a < 0x38800000u)
        return (uint16_t)(sign | (uint32_t)(from_bits(a) * 16777216.0f + 0.5f));
    return (uint16_t)(sign | ((a - 0x38000000u + 0xFFF + (a >> 13 & 1)) >> 13));
}

static inline uint16_t float_to_bfloat(float f)
{
    uint32_t v = to_bits(f);
    return (uint16_t)((v + 0x7FFF + (v >> 16 & 1)) >> 16);
}

/* One row of items as float32. */
static inline void load_row(const uint8_t *src, size_t n, size_t kind, float *x)
{
    if (kind == BF16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, src + 2 * i, 2);
            x[i] = from_bits((uint32_t)v << 16);
        }
    } else if (kind == F16) {
        for (size_t i = 0; i < n; i++) {
            uint16_t v;
            memcpy(&v, src + 2 * i, 2);
            x[i] = half_to_float(v);
        }
    } else {
        memcpy(x, src, 4 * n);
    }
}

/* Rows [rows][heads * dim] of `kind` to x, rotated back by `turns` ([rows][cos dim/2 | sin dim/2], may
 * be NULL), less the mean. NO_GAIN where a value is not finite. */
WIDE int load_rows(const uint8_t *src, size_t rows, size_t heads, size_t dim, size_t kind,
                   const float *turns, const float *mean, float *x, size_t stride)
{
    size_t width = heads * dim, half = dim / 2, item = kind == F32 ? 4 : 2;
    uint32_t worst = 0;
    for (size_t r = 0; r < rows; r++, src += width * item, x += stride) {
        load_row(src, width, kind, x);
        for (size_t i = 0; i < width; i++) {
            uint32_t a = to_bits(x[i]) & 0x7FFFFFFF;
            worst = a > worst ? a : worst;
        }
        if (turns) {
            const float *c = turns + r * dim, *s = c + half;
            for (size_t h = 0; h < heads; h++) {
                float *low = x + h * dim, *high = low + half;
                for (size_t i = 0; i < half; i++) {
                    float a = low[i], b = high[i];
                    low[i] = a * c[i] + b * s[i];
                    high[i] = b * c[i] - a * s[i];
                }
            }
        }
        for (size_t i = 0; i < width; i++)
            x[i] -= mean[i];
    }
    return worst < 0x7F800000u ? 0 : NO_GAIN;
}

WIDE void store_rows(const float *x, size_t stride, size_t rows, size_t heads, size_t dim,
                     size_t kind, const float *turns, const float *mean, uint8_t *dst)
{
    size_t width = heads * dim, half = dim / 2, item = kind == F32 ? 4 : 2;
    float row[dim];
    for (size_t r = 0; r < rows; r++, dst += width * item, x += stride) {
        for (size_t h = 0; h < heads; h++) {
            const float *from = x + h * dim, *m = mean + h * dim;
            uint8_t *to = dst + h * dim * item;
            for (size_t i = 0; i < dim; i++)
                row[i] = from[i] + m[i];
            if (turns) {
                const float *c = turns + r * dim, *s = c + half;
                for (size_t i = 0; i < half; i++) {
                    float a = row[i], b = row[i + half];
                    row[i] = a * c[i] - b * s[i];
                    row[i + half] = b * c[i] + a * s[i];
                }
            }
            if (kind == BF16)
                for (size_t i = 0; i < dim; i++) {
                    uint16_t v = float_to_bfloat(row[i]);
                    memcpy(to + 2 * i, &v, 2);
                }
            else if (kind == F16)
                for (size_t i = 0; i < dim; i++) {
                    uint16_t v = float_to_half(row[i]);
                    memcpy(to + 2 * i, &v, 2);
                }
            else
                memcpy(to, row, 4 * dim);
        }
    }
}

/* Nearest integer, with those below 1 - dead taken for zero and the others moved towards it. */
static inline float rounded(float v, float dead)
{
    float a = v < 0 ? -v : v;
    float n = (float)(int32_t)(a < LARGEST * 2 ? a + dead : LARGEST * 2);
    return v < 0 ? -n : n;
}

/* acc[TILE][PANEL] = x[TILE][width] * panel. */
#define PRODUCT(count) \
    do { \
        for (size_t k = 0; k < width; k++) { \
            const float *b = panel + k * PANEL; \
            for (size_t i = 0; i < (count); i++) { \
                float a = x[i * stride + k]; \
                for (size_t j = 0; j < PANEL; j++) \
                    acc[i][j] += a * b[j]; \
            } \
        } \
    } while (0)

static inline __attribute__((always_inline)) void product(const float *x, size_t count, size_t stride,
                                                          size_t width, const float *panel,
                                                          float acc[TILE][PANEL])
{
#ifdef __clang__
#pragma clang fp contract(fast)
#endif
    for (size_t i = 0; i < TILE; i++)
        for (size_t j = 0; j < PANEL; j++)
            acc[i][j] = 0;
    typedef float Eight __attribute__((vector_size(32), aligned(4)));
    if (count == TILE) {
        Eight l0 = {0}, l1 = {0}, l2 = {0}, l3 = {0}, l4 = {0}, l5 = {0};
        Eight h0 = {0}, h1 = {0}, h2 = {0}, h3 = {0}, h4 = {0}, h5 = {0};
        for (size_t k = 0; k < width; k++) {
            Eight low, high;
            memcpy(&low, panel + k * PANEL, 32);
            memcpy(&high, panel + k * PANEL + 8, 32);
#define ROW(i) l##i += low * x[i * stride + k]; h##i += high * x[i * stride + k];
            ROW(0) ROW(1) ROW(2) ROW(3) ROW(4) ROW(5)
#undef ROW
        }
#define OUT(i) memcpy(acc[i], &l##i, 32); memcpy(acc[i] + 8, &h##i, 32);
        OUT(0) OUT(1) OUT(2) OUT(3) OUT(4) OUT(5)
#undef OUT
    } else {
        PRODUCT(count);
    }
}

/* q[cols][rows] of x[rows][width] in the first `cols` columns of the packed basis. NO_GAIN where one
 * does not fit. */
PRODUCTS int forward(const float *x, size_t rows, size_t width, const float *basis, size_t cols,
                 float scale, float dead, int16_t *q)
{
    float acc[TILE][PANEL], worst = 0;
    /* A block of rows stays in the cache while all panels pass. */
    for (size_t block = 0; block < rows; block += 8 * TILE) {
        size_t stop = rows - block < 8 * TILE ? rows : block + 8 * TILE;
        for (size_t p = 0; p * PANEL < cols; p++) {
            size_t most = cols - p * PANEL < PANEL ? cols - p * PANEL : PANEL;
            for (size_t r = block; r < stop; r += TILE) {
                size_t n = stop - r < TILE ? stop - r : TILE;
                product(x + r * width, n, width, width, basis + p * width * PANEL, acc);
                for (size_t i = 0; i < n; i++)
                    for (size_t j = 0; j < PANEL; j++) {
                        float v = rounded(acc[i][j] * scale, dead), a = v < 0 ? -v : v;
                        worst = a > worst ? a : worst;
                        acc[i][j] = v;
                    }
                for (size_t j = 0; j < most; j++)
                    for (size_t i = 0; i < n; i++)
                        q[(p * PANEL + j) * rows + r + i] = (int16_t)(int32_t)acc[i][j];
            }
            if (!(worst <= LARGEST))
                return NO_GAIN;
        }
    }
    return 0;
}

/* x[rows][width] of q[cols][rows] in the first `cols` of `depth` rows of the packed basis; `scratch`:
 * cols * 48 values. */
PRODUCTS void inverse(const int16_t *q, size_t rows, size_t cols, const float *basis, size_t depth,
                  size_t width, float step, float *x, float *scratch)
{
    float acc[TILE][PANEL];
    for (size_t block = 0; block < rows; block += 8 * TILE) {
        size_t stop = rows - block < 8 * TILE ? rows : block + 8 * TILE;
        for (size_t c = 0; c < cols; c++)
            for (size_t r = block; r < stop; r++)
                scratch[(r - block) * cols + c] = (float)q[c * rows + r] * step;
        for (size_t p = 0; p * PANEL < width; p++) {
            size_t most = width - p * PANEL < PANEL ? width - p * PANEL : PANEL;
            for (size_t r = block; r < stop; r += TILE) {
                size_t n = stop - r < TILE ? stop - r : TILE;
                product(scratch + (r - block) * cols, n, cols, cols, basis + p * depth * PANEL, acc);
                for (size_t i = 0; i < n; i++)
                    memcpy(x + (r + i) * width + p * PANEL, acc[i], most * sizeof(float));
            }
        }
    }
}

/* A block of 8 rows by 8 columns on its side. */
static inline __attribute__((always_inline)) void turn_eight(const int16_t *from, size_t stride,
                                                             int16_t *to, size_t pitch)
{
#if defined(__GNUC__) && !defined(__clang__)
    typedef int16_t Eight __attribute__((vector_size(16)));
    Eight v[8], w[8];
    /* Three rounds: neighbours of row and column change places, then pairs, then fours. */
    const Eight low1 = {0, 8, 2, 10, 4, 12, 6, 14}, high1 = {1, 9, 3, 11, 5, 13, 7, 15};
    const Eight low2 = {0, 1, 8, 9, 4, 5, 12, 13}, high2 = {2, 3, 10, 11, 6, 7, 14, 15};
    const Eight low4 = {0, 1, 2, 3, 8, 9, 10, 11}, high4 = {4, 5, 6, 7, 12, 13, 14, 15};
    /* Written out: as loops they would go through memory. */
#define ALL(do) do(0) do(1) do(2) do(3) do(4) do(5) do(6) do(7)
#define LOAD(i) memcpy(&v[i], from + (i) * stride, 16);
#define SWAP(to, of, i, j, low, high) \
    to[i] = __builtin_shuffle(of[i], of[j], low); \
    to[j] = __builtin_shuffle(of[i], of[j], high);
#define STORE(i) memcpy(to + (i) * pitch, &w[i], 16);
    ALL(LOAD)
    SWAP(w, v, 0, 1, low1, high1) SWAP(w, v, 2, 3, low1, high1)
    SWAP(w, v, 4, 5, low1, high1) SWAP(w, v, 6, 7, low1, high1)
    SWAP(v, w, 0, 2, low2, high2) SWAP(v, w, 1, 3, low2, high2)
    SWAP(v, w, 4, 6, low2, high2) SWAP(v, w, 5, 7, low2, high2)
    SWAP(w, v, 0, 4, low4, high4) SWAP(w, v, 1, 5, low4, high4)
    SWAP(w, v, 2, 6, low4, high4) SWAP(w, v, 3, 7, low4, high4)
    ALL(STORE)
#undef ALL
#undef LOAD
#undef SWAP
#undef STORE
#else
    for (size_t i = 0; i < 8; i++)
        for (size_t j = 0; j < 8; j++)
            to[j * pitch + i] = from[i * stride + j];
#endif
}

/* Rows from `row` on to q[cols][rows], each column by a scale of its own; the largest, as bits. `n`: at
 * most BLOCK rows, so that columns are written a cache line at a time. */
static inline __attribute__((always_inline)) uint32_t quantise_block(
    const float *x, size_t row, size_t n, size_t rows, size_t cols, const float *scale, float dead,
    int16_t *q)
{
    int16_t part[BLOCK][SOME];
    uint32_t worst = 0, half = to_bits(dead);
    for (size_t first = 0; first < cols; first += SOME) {
        size_t most = cols - first < SOME ? cols - first : SOME;
        for (size_t i = 0; i < n; i++) {
            const float *from = x + i * cols + first, *by = scale + first;
            for (size_t j = 0; j < most; j++) {
                uint32_t bits = to_bits(from[j] * by[j]), size = bits & 0x7FFFFFFF;
                worst = size > worst ? size : worst;
                /* A condition on floats would not be vectorised: what is too large becomes 0. */
                uint32_t keep = -(uint32_t)(size < TOO_LARGE), away = half | (bits & 0x80000000u);
                float v = from_bits(bits & keep) + from_bits(away & keep);
                part[i][j] = (int16_t)(int32_t)v;
            }
        }
        size_t whole = n / 8 * 8, j = 0;
        for (; j + 8 <= most; j += 8)
            for (size_t i = 0; i < whole; i += 8)
                turn_eight(&part[i][j], SOME, q + (first + j) * rows + row + i, rows);
        for (size_t k = 0; k < most; k++)
            for (size_t i = k < j ? whole : 0; i < n; i++)
                q[(first + k) * rows + row + i] = part[i][k];
    }
    return worst;
}

WIDE int quantise(const float *x, size_t rows, size_t cols, const float *scale, float dead, int16_t *q)
{
    uint32_t worst = 0;
    for (size_t row = 0; row < rows; row += BLOCK) {
        size_t n = rows - row < BLOCK ? rows - row : BLOCK;
        uint32_t here = quantise_block(x + row * cols, row, n, rows, cols, scale, dead, q);
        worst = here > worst ? here : worst;
    }
    return worst < TOO_LARGE ? 0 : NO_GAIN;
}

/* int16 of 14 bits each: the low bytes of all, then the others, four in three bytes. */
WIDE void unpack(const uint8_t *src, size_t n, int16_t *q)
{
    const uint8_t *high = src + n;
    for (size_t i = 0; i < n; i += 4, high += 3) {
        uint32_t four = high[0] | (uint32_t)high[1] << 8 | (uint32_t)high[2] << 16;
        for (int j = 0; j < 4; j++, four >>= 6)
            q[i + j] = (int16_t)((int16_t)(uint16_t)(src[i + j] << 2 | four << 10) >> 2);
    }
}

/* x[n][cols] of `n` rows from `row` on of q[cols][rows], each column by a step of its own. */
WIDE static void dequantise(const int16_t *q, size_t rows, size_t cols, size_t row, size_t n,
                            const float *step, float *x)
{
    int16_t part[BLOCK][SOME];
    for (size_t first = 0; first < cols; first += SOME) {
        size_t most = cols - first < SOME ? cols - first : SOME, whole = n / 8 * 8, j = 0;
        for (; j + 8 <= most; j += 8)
            for (size_t i = 0; i < whole; i += 8)
                turn_eight(q + (first + j) * rows + row + i, rows, &part[i][j], SOME);
        for (size_t k = 0; k < most; k++)
            for (size_t i = k < j ? whole : 0; i < n; i++)
                part[i][k] = q[(first + k) * rows + row + i];
        for (size_t i = 0; i < n; i++)
            for (j = 0; j < most; j++)
                x[i * cols + first + j] = (float)part[i][j] * step[first + j];
    }
}

/* Inverse of `load_rows` and `quantise`, BLOCK rows at a time, which stay in the cache; `x`: room for
 * them. */
void restore(const int16_t *q, size_t rows, size_t heads, size_t dim, size_t kind, const float *step,
             const float *turns, const float *mean, uint8_t *dst, float *x)
{
    size_t width = heads * dim, item = kind == F32 ? 4 : 2;
    for (size_t row = 0; row < rows; row += BLOCK, dst += BLOCK * width * item) {
        size_t n = rows - row < BLOCK ? rows - row : BLOCK;
        dequantise(q, rows, width, row, n, step, x);
        store_rows(x, width, n, heads, dim, kind, turns ? turns + row * dim : NULL, mean, dst);
    }
}

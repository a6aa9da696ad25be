/* Eight bits a value: K per channel over 64 tokens, V per token and head. Needs no calibration.
 *
 *     K: for each 64 tokens: u16 scale of each channel (bfloat16, rounded up) | i8 of each value
 *     V: for each token: u16 scale of each head | i8 of each value */
#include "native.h"

enum { SPAN = 64 };

static inline float from_bits(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }

static inline float load(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, 2);
    return from_bits((uint32_t)v << 16);
}

/* A bfloat16 at least as large as bits / 127, never 0 or subnormal. */
static inline uint16_t scale_of(uint16_t largest)
{
    float f = from_bits((uint32_t)largest << 16) * (1.0f / 127.0f);
    uint32_t v;
    memcpy(&v, &f, 4);
    v = (v + 0xFFFF) >> 16;
    return (uint16_t)(v < 0x0080 ? 0x0080 : v);
}

static inline uint16_t bfloat(float f)
{
    uint32_t v;
    memcpy(&v, &f, 4);
    return (uint16_t)((v + 0x7FFF + (v >> 16 & 1)) >> 16);
}

static inline int8_t nearest(float v)
{
    float w = v + (v < 0 ? -0.5f : 0.5f);
    w = w > 127.0f ? 127.0f : w < -127.0f ? -127.0f : w;
    return (int8_t)(int32_t)w;
}

size_t int8_size(size_t rows, size_t heads, size_t dim)
{
    return (rows + SPAN - 1) / SPAN * heads * dim * 2 + rows * heads * dim + rows * heads * (2 + dim);
}

WIDE int int8_encode(const uint8_t *src, size_t rows, size_t heads, size_t dim, uint8_t *dst)
{
    size_t width = heads * dim;
    uint16_t worst = 0;
    uint16_t largest[1024];
    float inverse[1024];
    for (size_t first = 0; first < rows; first += SPAN) {
        size_t n = rows - first < SPAN ? rows - first : SPAN;
        const uint8_t *from = src + first * width * 2;
        for (size_t at = 0; at < width; at += 1024) {
            size_t some = width - at < 1024 ? width - at : 1024;
            memset(largest, 0, some * 2);
            for (size_t r = 0; r < n; r++)
                for (size_t i = 0; i < some; i++) {
                    uint16_t v;
                    memcpy(&v, from + 2 * (r * width + at + i), 2);
                    v &= 0x7FFF;
                    largest[i] = v > largest[i] ? v : largest[i];
                }
            for (size_t i = 0; i < some; i++) {
                worst = largest[i] > worst ? largest[i] : worst;
                uint16_t scale = scale_of(largest[i]);
                memcpy(dst + 2 * (at + i), &scale, 2);
                inverse[i] = 1.0f / from_bits((uint32_t)scale << 16);
            }
            int8_t *out = (int8_t *)(dst + 2 * width) + at;
            for (size_t r = 0; r < n; r++)
                for (size_t i = 0; i < some; i++)
                    out[r * width + i] = nearest(load(from + 2 * (r * width + at + i)) * inverse[i]);
        }
        dst += 2 * width + n * width;
    }
    src += rows * width * 2;
    for (size_t i = 0; i < rows * heads; i++, src += 2 * dim, dst += 2 + dim) {
        uint16_t most = 0;
        for (size_t j = 0; j < dim; j++) {
            uint16_t v;
            memcpy(&v, src + 2 * j, 2);
            v &= 0x7FFF;
            most = v > most ? v : most;
        }
        worst = most > worst ? most : worst;
        uint16_t scale = scale_of(most);
        float over = 1.0f / from_bits((uint32_t)scale << 16);
        memcpy(dst, &scale, 2);
        for (size_t j = 0; j < dim; j++)
            ((int8_t *)dst)[2 + j] = nearest(load(src + 2 * j) * over);
    }
    return worst < 0x7F80 ? 0 : NO_GAIN;
}

WIDE void int8_decode(const uint8_t *src, size_t rows, size_t heads, size_t dim, uint8_t *dst)
{
    size_t width = heads * dim;
    for (size_t first = 0; first < rows; first += SPAN) {
        size_t n = rows - first < SPAN ? rows - first : SPAN;
        const int8_t *in = (const int8_t *)src + 2 * width;
        for (size_t r = 0; r < n; r++)
            for (size_t i = 0; i < width; i++) {
                uint16_t v = bfloat((float)in[r * width + i] * load(src + 2 * i));
                memcpy(dst + 2 * (r * width + i), &v, 2);
            }
        src += 2 * width + n * width;
        dst += 2 * n * width;
    }
    for (size_t i = 0; i < rows * heads; i++, src += 2 + dim, dst += 2 * dim) {
        float scale = load(src);
        for (size_t j = 0; j < dim; j++) {
            uint16_t v = bfloat((float)((const int8_t *)src)[2 + j] * scale);
            memcpy(dst + 2 * j, &v, 2);
        }
    }
}

/* Eight states of the entropy coder in one register; `rans.c` has the format. */
#include "rans.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include "rans_tables.h"

enum { EIGHTS = RANS_LANES / 8 };

/* For each set of lanes: where the words of its lanes are from the first one on, and which lanes go to
 * the end, in order. */
static uint64_t from_first[256], to_end[256];

int rans_avx2(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("popcnt"))
        return 0;
    for (unsigned set = 0; set < 256; set++) {
        unsigned seen = 0, count = (unsigned)__builtin_popcount(set);
        uint64_t from = 0, to = 0;
        for (unsigned lane = 0; lane < 8; lane++)
            if (set >> lane & 1) {
                from |= (uint64_t)seen << 8 * lane;
                to |= (uint64_t)lane << 8 * (8 - count + seen);
                seen++;
            }
        from_first[set] = from;
        to_end[set] = to;
    }
    return 1;
}

AVX2 static inline __m256i picked(const uint64_t *orders, unsigned set, __m256i v)
{
    __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)orders[set]));
    return _mm256_permutevar8x32_epi32(v, order);
}

AVX2 static inline __m256i put_eight(const uint32_t *table, const uint8_t *s, __m256i x, uint8_t **words)
{
    __m256i y = of_symbols(table, s), start = _mm256_srli_epi32(y, 16);
    __m256i f = _mm256_and_si256(y, _mm256_set1_epi32(0xFFFF));
    /* The word leaves where x >= f << 20, unsigned. */
    __m256i limit = _mm256_slli_epi32(f, 32 - RANS_BITS);
    __m256i emit = _mm256_cmpeq_epi32(_mm256_max_epu32(x, limit), x);
    unsigned set = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(emit));
    __m256i low = picked(to_end, set, _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)));
    __m128i sixteen = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storeu_si128((__m128i *)(*words - 16), sixteen);
    *words -= 2 * (unsigned)_mm_popcnt_u32(set);
    x = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), emit);
    /* The quotient is below 2^20: in single precision it is off by one at most. */
    __m256 big = _mm256_cvtepi32_ps(_mm256_srli_epi32(x, 16));
    __m256 small = _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xFFFF)));
    __m256 v = _mm256_add_ps(_mm256_mul_ps(big, _mm256_set1_ps(65536.0f)), small);
    __m256i q = _mm256_cvttps_epi32(_mm256_div_ps(v, _mm256_cvtepi32_ps(f)));
    __m256i r = _mm256_sub_epi32(x, _mm256_mullo_epi32(q, f));
    __m256i under = _mm256_srai_epi32(r, 31);
    q = _mm256_add_epi32(q, under);
    r = _mm256_add_epi32(r, _mm256_and_si256(under, f));
    __m256i over = _mm256_cmpgt_epi32(f, r);
    over = _mm256_xor_si256(over, _mm256_set1_epi32(-1));
    q = _mm256_sub_epi32(q, over);
    r = _mm256_sub_epi32(r, _mm256_and_si256(over, f));
    return _mm256_add_epi32(_mm256_add_epi32(_mm256_slli_epi32(q, RANS_BITS), r), start);
}

AVX2 void rans_put_avx2(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                        uint8_t **words)
{
    __m256i *states = (__m256i *)x;
    size_t eight = rows / 8;
    for (; eight % EIGHTS; eight--) {
        __m256i *at = states + (eight - 1) % EIGHTS;
        _mm256_storeu_si256(at, put_eight(table, s + 8 * eight - 8, _mm256_loadu_si256(at), words));
    }
    __m256i x0 = _mm256_loadu_si256(states), x1 = _mm256_loadu_si256(states + 1);
    __m256i x2 = _mm256_loadu_si256(states + 2), x3 = _mm256_loadu_si256(states + 3);
    uint8_t *at = *words;
    for (const uint8_t *from = s + 8 * eight; from > s;) {
        from -= RANS_LANES;
        x3 = put_eight(table, from + 24, x3, &at);
        x2 = put_eight(table, from + 16, x2, &at);
        x1 = put_eight(table, from + 8, x1, &at);
        x0 = put_eight(table, from, x0, &at);
    }
    *words = at;
    _mm256_storeu_si256(states, x0);
    _mm256_storeu_si256(states + 1, x1);
    _mm256_storeu_si256(states + 2, x2);
    _mm256_storeu_si256(states + 3, x3);
}

AVX2 static inline __m256i get_eight(const uint32_t *table, __m256i *x, const uint8_t **words)
{
    __m256i index = _mm256_and_si256(*x, _mm256_set1_epi32(RANS_TOTAL - 1));
    __m256i slot = entries(table, index);
    __m256i f = _mm256_and_si256(_mm256_srli_epi32(slot, 8), _mm256_set1_epi32(4095));
    __m256i v = _mm256_mullo_epi32(f, _mm256_srli_epi32(*x, RANS_BITS));
    v = _mm256_add_epi32(v, _mm256_srli_epi32(slot, 20));
    __m256i need = _mm256_cmpeq_epi32(_mm256_srli_epi32(v, 16), _mm256_setzero_si256());
    unsigned set = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(need));
    __m256i word = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*words));
    word = _mm256_or_si256(_mm256_slli_epi32(v, 16), picked(from_first, set, word));
    *words += 2 * (unsigned)_mm_popcnt_u32(set);
    *x = _mm256_blendv_epi8(v, word, need);
    return _mm256_and_si256(slot, _mm256_set1_epi32(255));
}

/* Lowest bytes of eight values. */
AVX2 static inline void store_eight(uint8_t *s, __m256i v)
{
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)s, _mm_packus_epi16(words, words));
}

AVX2 size_t rans_get_avx2(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                          const uint8_t **words, const uint8_t *end)
{
    __m256i *states = (__m256i *)x;
    __m256i x0 = _mm256_loadu_si256(states), x1 = _mm256_loadu_si256(states + 1);
    __m256i x2 = _mm256_loadu_si256(states + 2), x3 = _mm256_loadu_si256(states + 3);
    const uint8_t *at = *words;
    size_t r = 0;
    for (; r + RANS_LANES <= rows && end - at >= 2 * RANS_LANES; r += RANS_LANES) {
        __m256i a = get_eight(table, &x0, &at), b = get_eight(table, &x1, &at);
        __m256i c = get_eight(table, &x2, &at), d = get_eight(table, &x3, &at);
        __m256i ab = _mm256_packus_epi32(a, b), cd = _mm256_packus_epi32(c, d);
        __m256i all = _mm256_packus_epi16(ab, cd); /* quarters of a, b, c, d in turn, twice */
        all = _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(s + r), all);
    }
    _mm256_storeu_si256(states, x0);
    _mm256_storeu_si256(states + 1, x1);
    _mm256_storeu_si256(states + 2, x2);
    _mm256_storeu_si256(states + 3, x3);
    for (size_t i = 0; r + 8 <= rows && i < EIGHTS && end - at >= 16; r += 8, i++) {
        __m256i eight = _mm256_loadu_si256(states + i);
        store_eight(s + r, get_eight(table, &eight, &at));
        _mm256_storeu_si256(states + i, eight);
    }
    *words = at;
    return r;
}

#else

int rans_avx2(void) { return 0; }

void rans_put_avx2(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                   uint8_t **words)
{
    (void)table, (void)s, (void)rows, (void)x, (void)words;
}

size_t rans_get_avx2(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                     const uint8_t **words, const uint8_t *end)
{
    (void)table, (void)s, (void)rows, (void)x, (void)words, (void)end;
    return 0;
}

#endif

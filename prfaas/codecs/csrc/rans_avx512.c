/* Sixteen states of the entropy coder in one register; `rans.c` has the format. */
#include "rans.h"

#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include "rans_tables.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,popcnt")))

int rans_avx512(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
        && __builtin_cpu_supports("popcnt");
}

AVX512 static inline __m512i put_sixteen(const uint32_t *table, const uint8_t *s, __m512i x,
                                         uint8_t **words)
{
    __m512i y = _mm512_castsi256_si512(of_symbols(table, s));
    y = _mm512_inserti64x4(y, of_symbols(table, s + 8), 1);
    __m512i f = _mm512_and_si512(y, _mm512_set1_epi32(0xFFFF)), start = _mm512_srli_epi32(y, 16);
    /* The word leaves where x >= f << 20. */
    __mmask16 emit = _mm512_cmpge_epu32_mask(x, _mm512_slli_epi32(f, 32 - RANS_BITS));
    unsigned count = (unsigned)_mm_popcnt_u32(emit);
    __m256i low = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(emit, x));
    /* To the end of the register. */
    const __m256i order = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    low = _mm256_permutexvar_epi16(_mm256_add_epi16(order, _mm256_set1_epi16((short)count)), low);
    _mm256_storeu_si256((__m256i *)(*words - 32), low);
    *words -= 2 * count;
    x = _mm512_mask_srli_epi32(x, emit, x, 16);
    /* The quotient is below 2^20: in single precision, a little less, it is right or one too small. */
    __m512 over = _mm512_div_ps(_mm512_set1_ps(1 - 1.0f / (1 << 21)), _mm512_cvtepi32_ps(f));
    __m512i q = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(x), over));
    __m512i rest = _mm512_sub_epi32(x, _mm512_mullo_epi32(q, f));
    /* (q << 12) + rest + start */
    __m512i gap = _mm512_sub_epi32(_mm512_set1_epi32(RANS_TOTAL), f);
    __m512i to = _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(q, gap));
    return _mm512_mask_add_epi32(to, _mm512_cmpge_epu32_mask(rest, f), to, gap);
}

AVX512 void rans_put_avx512(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                            uint8_t **words)
{
    __m512i x0 = _mm512_loadu_si512(x), x1 = _mm512_loadu_si512(x + 16);
    uint8_t *at = *words;
    for (const uint8_t *from = s + rows; from > s;) {
        from -= RANS_LANES;
        x1 = put_sixteen(table, from + 16, x1, &at);
        x0 = put_sixteen(table, from, x0, &at);
    }
    *words = at;
    _mm512_storeu_si512(x, x0);
    _mm512_storeu_si512(x + 16, x1);
}

/* Eight at a time: a state waits for its table, and more in one register would only wait longer. */
AVX512 static inline __m256i get_eight(const uint32_t *table, __m256i *x, const uint8_t **words)
{
    __m256i index = _mm256_and_si256(*x, _mm256_set1_epi32(RANS_TOTAL - 1));
    __m256i slot = entries(table, index);
    __m256i f = _mm256_and_si256(_mm256_srli_epi32(slot, 8), _mm256_set1_epi32(4095));
    __m256i v = _mm256_mullo_epi32(f, _mm256_srli_epi32(*x, RANS_BITS));
    v = _mm256_add_epi32(v, _mm256_srli_epi32(slot, 20));
    __mmask8 need = _mm256_cmplt_epu32_mask(v, _mm256_set1_epi32(RANS_LOWEST));
    __m256i word = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)*words));
    *words += 2 * (unsigned)_mm_popcnt_u32(need);
    word = _mm256_maskz_expand_epi32(need, word);
    *x = _mm256_mask_or_epi32(v, need, _mm256_slli_epi32(v, 16), word);
    return slot;
}

AVX512 size_t rans_get_avx512(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
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
        _mm_storel_epi64((__m128i *)(s + r), _mm256_cvtepi32_epi8(a));
        _mm_storel_epi64((__m128i *)(s + r + 8), _mm256_cvtepi32_epi8(b));
        _mm_storel_epi64((__m128i *)(s + r + 16), _mm256_cvtepi32_epi8(c));
        _mm_storel_epi64((__m128i *)(s + r + 24), _mm256_cvtepi32_epi8(d));
    }
    _mm256_storeu_si256(states, x0);
    _mm256_storeu_si256(states + 1, x1);
    _mm256_storeu_si256(states + 2, x2);
    _mm256_storeu_si256(states + 3, x3);
    *words = at;
    return r;
}

#else

int rans_avx512(void) { return 0; }

void rans_put_avx512(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x,
                     uint8_t **words)
{
    (void)table, (void)s, (void)rows, (void)x, (void)words;
}

size_t rans_get_avx512(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x,
                       const uint8_t **words, const uint8_t *end)
{
    (void)table, (void)s, (void)rows, (void)x, (void)words, (void)end;
    return 0;
}

#endif

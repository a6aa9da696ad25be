/* Look-ups of the entropy coder in tables, eight at a time, for the files that have registers for them. */
#ifndef PRFAAS_RANS_TABLES_H
#define PRFAAS_RANS_TABLES_H

#include <immintrin.h>
#include <stdint.h>

/* Where there is more, compilers inline what needs no more than this. */
#define AVX2 __attribute__((target("avx2,popcnt")))

/* Entries of a table by 32-bit indices: single loads are done sooner than a gather. */
AVX2 static inline __m128i four(const uint32_t *table, __m128i index)
{
    uint64_t low = (uint64_t)_mm_cvtsi128_si64(index);
    uint64_t high = (uint64_t)_mm_extract_epi64(index, 1);
    __m128i v = _mm_cvtsi32_si128((int)table[(uint32_t)low]);
    __m128i w = _mm_cvtsi32_si128((int)table[(uint32_t)high]);
    v = _mm_insert_epi32(v, (int)table[low >> 32], 1);
    w = _mm_insert_epi32(w, (int)table[high >> 32], 1);
    return _mm_unpacklo_epi64(v, w);
}

AVX2 static inline __m256i entries(const uint32_t *table, __m256i index)
{
    __m128i a = four(table, _mm256_castsi256_si128(index));
    __m128i b = four(table, _mm256_extracti128_si256(index, 1));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1);
}

/* Entries of eight symbols. */
AVX2 static inline __m256i of_symbols(const uint32_t *table, const uint8_t *s)
{
    __m128i v[2];
    for (int i = 0; i < 2; i++, s += 4) {
        __m128i low = _mm_cvtsi32_si128((int)table[s[0]]), high = _mm_cvtsi32_si128((int)table[s[2]]);
        low = _mm_insert_epi32(low, (int)table[s[1]], 1);
        v[i] = _mm_unpacklo_epi64(low, _mm_insert_epi32(high, (int)table[s[3]], 1));
    }
    return _mm256_inserti128_si256(_mm256_castsi128_si256(v[0]), v[1], 1);
}

#endif

/* Quantised coefficients, column by column, through interleaved rANS with a fixed ladder of tables.
 *
 * Each column names its table by its mean magnitude, or nothing at all where it is all zeros. Large
 * coefficients are cut: `shift` low bits go as they are, the rest through the table.
 *
 *     u8 of each column: 255 zeros, else table | shift << 5 | u32 escapes | u32 words |
 *     escapes (i16 each) | low bits | 8 states (u32) | words (u16)
 *
 * Eight states take turns within a column and share one stream of 16-bit words (Giesen,
 * "Interleaved entropy coders"): the states are independent, so the CPU works on all of them. */
#include "native.h"

#include "ladder.h"

enum { LANES = 8, PROB_BITS = 12, TOTAL = 1 << PROB_BITS, ZEROS = 255, MAX_SHIFT = 6 };
#define LOWEST 65536u

typedef struct {
    uint32_t limit, factor, add;
    uint16_t start, rest, shift;
} Symbol;

static Symbol symbols[LADDER_TABLES][LADDER_LONGEST];
/* Slot: symbol | (frequency - 1) << 8 | offset within the symbol << 20; frequencies reach 4096. */
static uint32_t slots[LADDER_TABLES][TOTAL];

static uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

void rans_setup(void)
{
    for (int k = 0; k < LADDER_TABLES; k++) {
        uint32_t start = 0;
        for (int s = 0; s < 2 * ladder_reach[k] + 2; s++) {
            uint32_t f = ladder_freq[k][s];
            Symbol *y = &symbols[k][s];
            y->limit = f << (32 - PROB_BITS);
            y->start = (uint16_t)start;
            y->rest = (uint16_t)(TOTAL - f);
            /* v / f == (v * factor + add) >> (32 + shift) for every 32-bit v: rounded up where that
             * is exact, else down (libdivide's two cases). */
            unsigned shift = 0;
            while (f >> (shift + 1))
                shift++;
            uint64_t power = (uint64_t)1 << (32 + shift);
            uint64_t over = power % f;
            int up = over && f - over < (uint64_t)1 << shift;
            y->factor = over ? (uint32_t)(power / f + (up ? 1 : 0)) : 0xFFFFFFFFu;
            y->add = up ? 0 : y->factor;
            y->shift = (uint16_t)shift;
            for (uint32_t i = 0; i < f; i++)
                slots[k][start + i] = (uint32_t)s | (f - 1) << 8 | i << 20;
            start += f;
        }
    }
}

size_t rans_bound(size_t rows, size_t cols)
{
    /* A symbol takes at most 12 bits, an escape two bytes besides, low bits six. */
    return cols + 8 + 4 * LANES + rows * cols * 6 + 64;
}

WIDE static uint64_t magnitude(const int16_t *q, size_t rows)
{
    uint64_t sum = 0;
    for (size_t at = 0; at < rows;) {
        size_t stop = rows - at < 32768 ? rows : at + 32768;
        uint32_t part = 0;
        for (; at < stop; at++)
            part += (uint32_t)(q[at] < 0 ? -q[at] : q[at]);
        sum += part;
    }
    return sum;
}

static uint8_t choose(const int16_t *q, size_t rows)
{
    uint64_t sum = magnitude(q, rows);
    if (!sum)
        return ZEROS;
    uint64_t mean = (sum << 16) / rows;
    unsigned shift = 0;
    while (shift < MAX_SHIFT && mean >> shift > ladder_bound[LADDER_TABLES - 2])
        shift++;
    mean >>= shift;
    unsigned k = 0;
    while (k < LADDER_TABLES - 1 && mean > ladder_bound[k])
        k++;
    return (uint8_t)(k | shift << 5);
}

#define PUT(lane, s) \
    do { \
        const Symbol *y = &table[s]; \
        uint32_t v = x[lane]; \
        unsigned emit = v >= y->limit; \
        uint16_t word = (uint16_t)v; \
        memcpy(word_at - 2, &word, 2); \
        word_at -= 2 * emit; \
        v = emit ? v >> 16 : v; \
        uint32_t quotient = (uint32_t)(((uint64_t)v * y->factor + y->add) >> 32) >> y->shift; \
        x[lane] = v + y->start + quotient * y->rest; \
    } while (0)

/* `scratch`: a byte of each row. */
ptrdiff_t rans_encode(const int16_t *q, size_t rows, size_t cols, uint8_t *dst, size_t room,
                      uint32_t *scratch)
{
    if (room < rans_bound(rows, cols))
        return NO_GAIN;
    uint8_t *classes = dst, *head = dst + cols, *out = head + 8;
    uint32_t escapes = 0;
    uint64_t bits = 0;
    unsigned have = 0;
    /* Forward: classes, escapes. */
    for (size_t c = 0; c < cols; c++) {
        const int16_t *column = q + c * rows;
        uint8_t class = classes[c] = choose(column, rows);
        if (class == ZEROS)
            continue;
        int shift = class >> 5, half = shift ? 1 << (shift - 1) : 0, reach = ladder_reach[class & 31];
        for (size_t r = 0; r < rows; r++) {
            int high = (column[r] + half) >> shift;
            if (high > reach || high < -reach) {
                memcpy(out, &column[r], 2);
                out += 2;
                escapes++;
            }
        }
    }
    for (size_t c = 0; c < cols; c++) {
        unsigned shift = classes[c] == ZEROS ? 0 : classes[c] >> 5;
        if (!shift)
            continue;
        const int16_t *column = q + c * rows;
        int half = 1 << (shift - 1), mask = (1 << shift) - 1;
        for (size_t r = 0; r < rows; r++) {
            bits |= (uint64_t)((column[r] + half) & mask) << have;
            have += shift;
            if (have >= 32) {
                store32(out, (uint32_t)bits);
                out += 4;
                bits >>= 32;
                have -= 32;
            }
        }
    }
    for (; have > 0; have = have > 8 ? have - 8 : 0, bits >>= 8)
        *out++ = (uint8_t)bits;
    /* Backward, from the end of the room: words. */
    uint8_t *word_at = dst + room, *s = (uint8_t *)scratch;
    uint32_t x[LANES];
    for (int i = 0; i < LANES; i++)
        x[i] = LOWEST;
    for (size_t c = cols; c-- > 0;) {
        uint8_t class = classes[c];
        if (class == ZEROS)
            continue;
        const int16_t *column = q + c * rows;
        int shift = class >> 5, half = shift ? 1 << (shift - 1) : 0, reach = ladder_reach[class & 31];
        for (size_t r = 0; r < rows; r++) {
            int high = (column[r] + half) >> shift;
            s[r] = (uint8_t)(high > reach || high < -reach ? 2 * reach + 1 : high + reach);
        }
        const Symbol *table = symbols[class & 31];
        size_t r = rows;
        while (r % LANES) {
            r--;
            PUT(r % LANES, s[r]);
        }
        while (r) {
            r -= LANES;
            PUT(7, s[r + 7]); PUT(6, s[r + 6]); PUT(5, s[r + 5]); PUT(4, s[r + 4]);
            PUT(3, s[r + 3]); PUT(2, s[r + 2]); PUT(1, s[r + 1]); PUT(0, s[r]);
        }
    }
    size_t words = (size_t)(dst + room - word_at);
    store32(head, escapes);
    store32(head + 4, (uint32_t)(words / 2));
    for (int i = 0; i < LANES; i++, out += 4)
        store32(out, x[i]);
    memmove(out, word_at, words);
    return out + words - dst;
}

#define GET(lane) \
    do { \
        uint32_t v = x[lane], slot = table[v & (TOTAL - 1)]; \
        v = ((slot >> 8 & 4095) + 1) * (v >> PROB_BITS) + (slot >> 20); \
        s[lane] = (uint8_t)slot; \
        unsigned need = v < LOWEST; \
        uint32_t more = v << 16 | load16(words); \
        x[lane] = need ? more : v; \
        words += 2 * need; \
    } while (0)

/* Symbols of one column to `s`. CORRUPT where the words end too soon. */
static int read_column(const uint32_t *table, size_t rows, uint32_t *states, uint8_t *s,
                       const uint8_t **at, const uint8_t *end)
{
    const uint8_t *words = *at;
    uint32_t x[LANES];
    memcpy(x, states, sizeof x);
    size_t r = 0;
    for (; r + LANES <= rows && end - words >= 2 * LANES; r += LANES, s += LANES) {
        GET(0); GET(1); GET(2); GET(3); GET(4); GET(5); GET(6); GET(7);
    }
    for (; r < rows; r++) {
        unsigned lane = r % LANES;
        uint32_t v = x[lane], slot = table[v & (TOTAL - 1)];
        v = ((slot >> 8 & 4095) + 1) * (v >> PROB_BITS) + (slot >> 20);
        *s++ = (uint8_t)slot;
        if (v < LOWEST) {
            if (end - words < 2)
                return CORRUPT;
            v = v << 16 | load16(words);
            words += 2;
        }
        x[lane] = v;
    }
    memcpy(states, x, sizeof x);
    *at = words;
    return 0;
}

WIDE static uint8_t spread(const uint8_t *s, size_t rows, int reach, int16_t *column)
{
    uint8_t most = 0;
    for (size_t r = 0; r < rows; r++) {
        column[r] = (int16_t)(s[r] - reach);
        most = s[r] > most ? s[r] : most;
    }
    return most;
}

int rans_decode(const uint8_t *src, size_t size, size_t rows, size_t cols, int16_t *q,
                uint32_t *scratch)
{
    if (size < cols + 8 + 4 * LANES)
        return CORRUPT;
    const uint8_t *classes = src, *end = src + size, *at = src + cols + 8;
    size_t escapes = load32(src + cols), words = load32(src + cols + 4), low_bits = 0;
    for (size_t c = 0; c < cols; c++)
        if (classes[c] != ZEROS) {
            if ((classes[c] & 31) >= LADDER_TABLES || classes[c] >> 5 > MAX_SHIFT)
                return CORRUPT;
            low_bits += (size_t)(classes[c] >> 5) * rows;
        }
    size_t low_bytes = (low_bits + 7) / 8, left = (size_t)(end - at) - 4 * LANES;
    if (escapes > rows * cols || left != 2 * escapes + low_bytes + 2 * words)
        return CORRUPT;
    const uint8_t *escape = at, *escape_end = at + 2 * escapes;
    const uint8_t *low = escape_end, *low_end = low + low_bytes;
    uint32_t x[LANES];
    memcpy(x, low_end, sizeof x);
    at = low_end + sizeof x;
    uint8_t *s = (uint8_t *)scratch;
    uint64_t bits = 0;
    unsigned have = 0;
    for (size_t c = 0; c < cols; c++) {
        int16_t *column = q + c * rows;
        uint8_t class = classes[c];
        if (class == ZEROS) {
            memset(column, 0, rows * sizeof *column);
            continue;
        }
        unsigned shift = class >> 5;
        int reach = ladder_reach[class & 31];
        if (read_column(slots[class & 31], rows, x, s, &at, end))
            return CORRUPT;
        int escaped = spread(s, rows, reach, column) > 2 * reach;
        if (shift) {
            int half = 1 << (shift - 1), mask = (1 << shift) - 1;
            for (size_t r = 0; r < rows; r++) {
                if (have < shift) {
                    for (; have <= 24 && low < low_end; have += 8)
                        bits |= (uint64_t)*low++ << have;
                }
                column[r] = (int16_t)(column[r] * (1 << shift) + (int)(bits & (uint64_t)mask) - half);
                bits >>= shift;
                have -= shift;
            }
        }
        if (escaped)
            for (size_t r = 0; r < rows; r++)
                if (s[r] > 2 * reach) {
                    if (escape_end - escape < 2)
                        return CORRUPT;
                    memcpy(&column[r], escape, 2);
                    escape += 2;
                }
    }
    int settled = at == end && escape == escape_end;
    for (int i = 0; i < LANES; i++)
        settled &= x[i] == LOWEST;
    return settled ? 0 : CORRUPT;
}

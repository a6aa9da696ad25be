/* Quantised coefficients, column by column, through interleaved rANS with a fixed ladder of tables.
 *
 * Each column names its table by its mean magnitude, or nothing at all where it is all zeros. Large
 * coefficients are cut: `shift` low bits go as they are, the rest through the table.
 *
 *     u8 of each column: 255 zeros, else table | shift << 5 | u32 escapes | u32 words |
 *     escapes (i16 each) | low bits: of every 8 rows `shift` bytes | 32 states (u32) | words (u16)
 *
 * States take turns within a column and share one stream of 16-bit words (Giesen, "Interleaved
 * entropy coders"): they are independent, so the CPU works on all of them; with AVX2, eight in one
 * register (`rans_avx2.c`), with AVX-512 sixteen, which makes the same bytes. */
#include "native.h"

#include "ladder.h"
#include "rans.h"

enum { ZEROS = 255, MAX_SHIFT = 6 };

/* Of each symbol: frequency | first slot << 16. */
static uint32_t symbols[LADDER_TABLES][LADDER_LONGEST];
/* Slot: symbol | frequency << 8 | offset within the symbol << 20; no symbol has all slots. */
static uint32_t slots[LADDER_TABLES][RANS_TOTAL];
static int level;

static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }

int rans_level(int most)
{
    int found = !rans_avx2() ? 0 : rans_avx512() ? 2 : 1;
    return level = found < most ? found : most;
}

void rans_setup(void)
{
    rans_level(2);
    for (int k = 0; k < LADDER_TABLES; k++) {
        uint32_t start = 0;
        for (int s = 0; s < 2 * ladder_reach[k] + 2; s++) {
            uint32_t f = ladder_freq[k][s];
            symbols[k][s] = f | start << 16;
            for (uint32_t i = 0; i < f; i++)
                slots[k][start + i] = (uint32_t)s | f << 8 | i << 20;
            start += f;
        }
    }
}

size_t rans_bound(size_t rows, size_t cols)
{
    /* A symbol takes at most 12 bits, an escape two bytes besides, low bits six. */
    return cols * 8 + 8 + 4 * RANS_LANES + rows * cols * 6 + 64;
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

/* Symbols of a column; whether one of them is the escape. */
WIDE static int to_symbols(const int16_t *column, size_t rows, int shift, int reach, uint8_t *s)
{
    int16_t half = (int16_t)(shift ? 1 << (shift - 1) : 0), most = (int16_t)(2 * reach + 1);
    int16_t escaped = 0;
    for (size_t r = 0; r < rows; r++) {
        int16_t v = (int16_t)(((int16_t)(column[r] + half) >> shift) + reach);
        int16_t out = (int16_t)-(v < 0 || v >= most);
        escaped |= out;
        s[r] = (uint8_t)((v & ~out) | (most & out));
    }
    return escaped != 0;
}

/* Where the next escape is; NULL: nowhere. */
static const uint8_t *next_escape(const uint8_t *s, const uint8_t *end, int reach)
{
    return memchr(s, 2 * reach + 1, (size_t)(end - s));
}

/* Low `shift` bits of each byte of `v`, one after another. */
static inline uint64_t squeeze(uint64_t v, unsigned shift)
{
    v = (v & 0x00FF00FF00FF00FFu) | (v >> (8 - shift) & 0x00FF00FF00FF00FFu << shift);
    v = (v & 0x0000FFFF0000FFFFu) | (v >> (16 - 2 * shift) & 0x0000FFFF0000FFFFu << 2 * shift);
    return (v & 0xFFFFFFFFu) | v >> 32 << 4 * shift;
}

static inline uint64_t widen(uint64_t v, unsigned shift)
{
    uint64_t four = ((uint64_t)1 << 4 * shift) - 1, two = ((uint64_t)1 << 2 * shift) - 1,
             one = ((uint64_t)1 << shift) - 1;
    v = (v & four) | (v >> 4 * shift & four) << 32;
    v = (v & (two | two << 32)) | (v >> 2 * shift & (two | two << 32)) << 16;
    uint64_t even = one | one << 16 | one << 32 | one << 48;
    return (v & even) | (v >> shift & even) << 8;
}

WIDE static void low_bytes(const int16_t *column, size_t rows, unsigned shift, uint8_t *low)
{
    int half = 1 << (shift - 1), mask = (1 << shift) - 1;
    for (size_t r = 0; r < rows; r++)
        low[r] = (uint8_t)((column[r] + half) & mask);
}

static uint8_t *write_low(const int16_t *column, size_t rows, unsigned shift, uint8_t *low,
                          uint8_t *out)
{
    low_bytes(column, rows, shift, low);
    memset(low + rows, 0, 8);
    for (size_t r = 0; r < rows; r += 8, out += shift) {
        uint64_t v;
        memcpy(&v, low + r, 8);
        v = squeeze(v, shift);
        memcpy(out, &v, 8);
    }
    return out;
}

/* Symbols of `rows` rows, the last first. */
static void put_slow(const uint32_t *table, const uint8_t *s, size_t first, size_t rows, uint32_t *x,
                uint8_t **words)
{
    uint8_t *at = *words;
    for (size_t r = rows; r-- > first;) {
        uint32_t y = table[s[r]], f = y & 0xFFFF, v = x[r % RANS_LANES];
        if (v >= f << (32 - RANS_BITS)) {
            uint16_t word = (uint16_t)v;
            memcpy(at -= 2, &word, 2);
            v >>= 16;
        }
        x[r % RANS_LANES] = (v / f << RANS_BITS) + v % f + (y >> 16);
    }
    *words = at;
}

static void put(const uint32_t *table, const uint8_t *s, size_t rows, uint32_t *x, uint8_t **words)
{
    size_t most = level == 2 ? rows / RANS_LANES * RANS_LANES : 0, many = level ? rows / 8 * 8 : 0;
    put_slow(table, s, many, rows, x, words);
    if (many > most)
        rans_put_avx2(table, s + most, many - most, x, words);
    if (most)
        rans_put_avx512(table, s, most, x, words);
}

/* `scratch`: a byte of each value, and of 8 more. */
ptrdiff_t rans_encode(const int16_t *q, size_t rows, size_t cols, uint8_t *dst, size_t room,
                      uint8_t *scratch)
{
    if (room < rans_bound(rows, cols))
        return NO_GAIN;
    uint8_t *classes = dst, *head = dst + cols, *out = head + 8;
    uint32_t escapes = 0;
    for (size_t c = 0; c < cols; c++) {
        const int16_t *column = q + c * rows;
        uint8_t class = classes[c] = choose(column, rows), *s = scratch + c * rows;
        if (class == ZEROS)
            continue;
        int reach = ladder_reach[class & 31];
        if (to_symbols(column, rows, class >> 5, reach, s))
            for (const uint8_t *at = s; (at = next_escape(at, s + rows, reach)); at++) {
                memcpy(out, &column[at - s], 2);
                out += 2;
                escapes++;
            }
    }
    /* Backward, from the end of the room: words. */
    uint8_t *word_at = dst + room;
    uint32_t x[RANS_LANES];
    for (int i = 0; i < RANS_LANES; i++)
        x[i] = RANS_LOWEST;
    for (size_t c = cols; c-- > 0;) {
        if (classes[c] == ZEROS)
            continue;
        put(symbols[classes[c] & 31], scratch + c * rows, rows, x, &word_at);
    }
    for (size_t c = 0; c < cols; c++)
        if (classes[c] != ZEROS && classes[c] >> 5)
            out = write_low(q + c * rows, rows, classes[c] >> 5, scratch, out);
    size_t words = (size_t)(dst + room - word_at);
    store32(head, escapes);
    store32(head + 4, (uint32_t)(words / 2));
    memcpy(out, x, sizeof x);
    memmove(out + sizeof x, word_at, words);
    return out + sizeof x + words - dst;
}

/* Symbols of rows from `first` to `s`. CORRUPT where the words end too soon. */
static int get_slow(const uint32_t *table, uint8_t *s, size_t first, size_t rows, uint32_t *x,
                    const uint8_t **words, const uint8_t *end)
{
    const uint8_t *at = *words;
    for (size_t r = first; r < rows; r++) {
        uint32_t v = x[r % RANS_LANES], slot = table[v & (RANS_TOTAL - 1)];
        v = (slot >> 8 & 4095) * (v >> RANS_BITS) + (slot >> 20);
        s[r] = (uint8_t)slot;
        if (v < RANS_LOWEST) {
            if (end - at < 2)
                return CORRUPT;
            uint16_t word;
            memcpy(&word, at, 2);
            v = v << 16 | word;
            at += 2;
        }
        x[r % RANS_LANES] = v;
    }
    *words = at;
    return 0;
}

static int get(const uint32_t *table, uint8_t *s, size_t rows, uint32_t *x, const uint8_t **words,
               const uint8_t *end)
{
    size_t done = level == 2 ? rans_get_avx512(table, s, rows, x, words, end) : 0;
    if (level)
        done += rans_get_avx2(table, s + done, rows - done, x, words, end);
    return get_slow(table, s, done, rows, x, words, end);
}

/* Values of a column out of its symbols; whether one of them is the escape. */
WIDE static int spread(const uint8_t *s, size_t rows, int reach, unsigned shift, int16_t *column)
{
    uint8_t most = 0;
    for (size_t r = 0; r < rows; r++) {
        column[r] = (int16_t)((s[r] - reach) * (1 << shift));
        most = s[r] > most ? s[r] : most;
    }
    return most > 2 * reach;
}

WIDE static void add_low(const uint8_t *low, size_t rows, unsigned shift, int16_t *column)
{
    int half = 1 << (shift - 1);
    for (size_t r = 0; r < rows; r++)
        column[r] = (int16_t)(column[r] + low[r] - half);
}

/* Behind `in` come the states, so eight bytes are there. */
static void read_low(const uint8_t *in, size_t rows, unsigned shift, uint8_t *low, int16_t *column)
{
    for (size_t r = 0; r < rows; r += 8, in += shift) {
        uint64_t v;
        memcpy(&v, in, 8);
        v = widen(v, shift);
        memcpy(low + r, &v, 8);
    }
    add_low(low, rows, shift, column);
}

/* `scratch`: two bytes of each row, and 16 more. */
int rans_decode(const uint8_t *src, size_t size, size_t rows, size_t cols, int16_t *q,
                uint8_t *scratch)
{
    if (size < cols + 8 + 4 * RANS_LANES)
        return CORRUPT;
    const uint8_t *classes = src, *end = src + size, *at = src + cols + 8;
    size_t escapes = load32(src + cols), words = load32(src + cols + 4), groups = (rows + 7) / 8;
    size_t low_size = 0;
    for (size_t c = 0; c < cols; c++)
        if (classes[c] != ZEROS) {
            if ((classes[c] & 31) >= LADDER_TABLES || classes[c] >> 5 > MAX_SHIFT)
                return CORRUPT;
            low_size += (size_t)(classes[c] >> 5) * groups;
        }
    size_t left = (size_t)(end - at) - 4 * RANS_LANES;
    if (escapes > rows * cols || left != 2 * escapes + low_size + 2 * words)
        return CORRUPT;
    const uint8_t *escape = at, *escape_end = at + 2 * escapes, *low = escape_end;
    uint32_t x[RANS_LANES];
    memcpy(x, low + low_size, sizeof x);
    at = low + low_size + sizeof x;
    uint8_t *s = scratch, *bits = scratch + rows + 8;
    for (size_t c = 0; c < cols; c++) {
        int16_t *column = q + c * rows;
        uint8_t class = classes[c];
        if (class == ZEROS) {
            memset(column, 0, rows * sizeof *column);
            continue;
        }
        unsigned shift = class >> 5;
        int reach = ladder_reach[class & 31];
        if (get(slots[class & 31], s, rows, x, &at, end))
            return CORRUPT;
        int escaped = spread(s, rows, reach, shift, column);
        if (shift) {
            read_low(low, rows, shift, bits, column);
            low += shift * groups;
        }
        if (escaped)
            for (const uint8_t *e = s; (e = next_escape(e, s + rows, reach)); e++) {
                if (escape_end - escape < 2)
                    return CORRUPT;
                memcpy(&column[e - s], escape, 2);
                escape += 2;
            }
    }
    int settled = at == end && escape == escape_end;
    for (int i = 0; i < RANS_LANES; i++)
        settled &= x[i] == RANS_LOWEST;
    return settled ? 0 : CORRUPT;
}

/* Lossless packing of floating-point rows: exponents through prefix codes, the rest as it is.
 *
 * An item is rotated left by one bit, so that its top byte is the exponent (bfloat16: all of it,
 * float16: exponent and high mantissa) and the sign is at the bottom. Columns are sorted by their
 * mean exponent into four classes of the same size, each with a code and a bit stream of its own:
 * channels of K differ in scale by far more than tokens do, and four streams are decoded at once.
 *
 *     u8 class of each column | u8 mode of each class | per coded class its code lengths |
 *     u32 size of each stream | streams | the other bytes of all items
 *
 * Code lengths: u8 lowest symbol, u8 highest, then 4 bits for each; 0: not used. Modes: 0 bytes as
 * they are, 1 prefix code, 2 one symbol (one byte). */
#include "native.h"

/* Codes may have LIMIT bits. We make none of more than SHORT: tables of half the size stay in the L1
 * cache, which is worth more than the thousandth that they cost. */
enum { CLASSES = 4, LIMIT = 11, SHORT = 10, SLOTS = 1 << LIMIT };
enum { STORED, CODED, SINGLE };

typedef struct {
    uint32_t count[256];
    uint8_t length[256];
    uint16_t code[256];
    int used, low, high;
} Code;

static uint16_t load16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static uint32_t load32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static uint64_t load64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static void store64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }

/* Exponent bytes to `top`, the rest of each item to `rest`. */
WIDE static void split2(const uint8_t *src, size_t n, uint8_t *top, uint8_t *rest)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t v = load16(src + 2 * i);
        top[i] = (uint8_t)(v >> 7);
        rest[i] = (uint8_t)((v << 1) | (v >> 15));
    }
}

WIDE static void merge2(const uint8_t *top, const uint8_t *rest, size_t n, uint8_t *dst)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t v = (uint16_t)((top[i] << 7) | (rest[i] >> 1) | (rest[i] << 15));
        memcpy(dst + 2 * i, &v, 2);
    }
}

static void split4(const uint8_t *src, size_t n, uint8_t *top, uint8_t *rest)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t v = load32(src + 4 * i);
        v = (v << 1) | (v >> 31);
        top[i] = (uint8_t)(v >> 24);
        rest[3 * i] = (uint8_t)v;
        rest[3 * i + 1] = (uint8_t)(v >> 8);
        rest[3 * i + 2] = (uint8_t)(v >> 16);
    }
}

static void merge4(const uint8_t *top, const uint8_t *rest, size_t n, uint8_t *dst)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t v = rest[3 * i] | (uint32_t)rest[3 * i + 1] << 8
            | (uint32_t)rest[3 * i + 2] << 16 | (uint32_t)top[i] << 24;
        store32(dst + 4 * i, (v >> 1) | (v << 31));
    }
}

WIDE static void column_sums(const uint8_t *top, size_t rows, size_t cols, uint32_t *sums)
{
    memset(sums, 0, cols * sizeof *sums);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            sums[c] += top[r * cols + c];
}

/* Class of each column by rank of its sum; ties and order are the columns' own. */
static void rank_columns(const uint32_t *sums, size_t cols, uint16_t *order, uint8_t *classes)
{
    /* Sums of at most 65535 rows are below 2^24: a radix sort over three bytes. */
    uint16_t other[65536 / 8];
    uint16_t *from = order, *to = other;
    for (size_t c = 0; c < cols; c++)
        order[c] = (uint16_t)c;
    for (int shift = 0; shift < 32; shift += 8) {
        uint32_t at[257] = {0};
        for (size_t c = 0; c < cols; c++)
            at[((sums[from[c]] >> shift) & 255) + 1]++;
        for (int i = 0; i < 256; i++)
            at[i + 1] += at[i];
        for (size_t c = 0; c < cols; c++)
            to[at[(sums[from[c]] >> shift) & 255]++] = from[c];
        uint16_t *swap = from; from = to; to = swap;
    }
    for (size_t i = 0; i < cols; i++)
        classes[from[i]] = (uint8_t)(i * CLASSES / cols);
}

/* Columns in the order of their classes, and how many each class has. */
static int class_order(const uint8_t *classes, size_t cols, uint16_t *order, size_t *width)
{
    size_t at = 0;
    for (int k = 0; k < CLASSES; k++) {
        size_t first = at;
        for (size_t c = 0; c < cols; c++)
            if (classes[c] == k)
                order[at++] = (uint16_t)c;
        width[k] = at - first;
    }
    return at == cols ? 0 : CORRUPT;
}

static void gather(const uint8_t *top, size_t rows, size_t cols, const uint16_t *order,
                   size_t width, uint8_t *out)
{
    size_t r = 0;
    for (; r + 4 <= rows; r += 4, top += 4 * cols, out += 4 * width)
        for (size_t i = 0; i < width; i++) {
            const uint8_t *from = top + order[i];
            out[i] = *from;
            out[i + width] = from[cols];
            out[i + 2 * width] = from[2 * cols];
            out[i + 3 * width] = from[3 * cols];
        }
    for (; r < rows; r++, top += cols, out += width)
        for (size_t i = 0; i < width; i++)
            out[i] = top[order[i]];
}

static void scatter(const uint8_t *in, size_t rows, size_t cols, const uint16_t *order,
                    size_t width, uint8_t *top)
{
    size_t r = 0;
    for (; r + 4 <= rows; r += 4, top += 4 * cols, in += 4 * width)
        for (size_t i = 0; i < width; i++) {
            uint8_t *to = top + order[i];
            *to = in[i];
            to[cols] = in[i + width];
            to[2 * cols] = in[i + 2 * width];
            to[3 * cols] = in[i + 3 * width];
        }
    for (; r < rows; r++, top += cols, in += width)
        for (size_t i = 0; i < width; i++)
            top[order[i]] = in[i];
}

static void count(const uint8_t *in, size_t n, Code *code)
{
    uint32_t part[4][256];
    memset(part, 0, sizeof part);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t v = load64(in + i);
        part[0][v & 255]++; part[1][v >> 8 & 255]++;
        part[2][v >> 16 & 255]++; part[3][v >> 24 & 255]++;
        part[0][v >> 32 & 255]++; part[1][v >> 40 & 255]++;
        part[2][v >> 48 & 255]++; part[3][v >> 56]++;
    }
    for (; i < n; i++)
        part[0][in[i]]++;
    code->used = 0;
    for (int s = 0; s < 256; s++) {
        code->count[s] = part[0][s] + part[1][s] + part[2][s] + part[3][s];
        if (code->count[s]) {
            if (!code->used++)
                code->low = s;
            code->high = s;
        }
    }
}

/* Huffman lengths of at least two used symbols, at most SHORT: counts are flattened until it fits. */
static void assign_lengths(Code *code)
{
    uint32_t weight[512];
    uint16_t parent[512], symbol[256];
    for (uint32_t floor = 0;; floor = floor ? floor * 2 : 1) {
        int n = 0;
        for (int s = code->low; s <= code->high; s++)
            if (code->count[s]) {
                uint32_t w = code->count[s] + floor;
                int i = n++;
                for (; i && weight[i - 1] > w; i--) {
                    weight[i] = weight[i - 1];
                    symbol[i] = symbol[i - 1];
                }
                weight[i] = w;
                symbol[i] = (uint16_t)s;
            }
        /* Two queues: leaves in order, inner nodes as they are made. */
        int leaf = 0, inner = n, end = n;
        while (end < 2 * n - 1) {
            uint32_t sum = 0;
            for (int two = 0; two < 2; two++) {
                int pick = inner == end || (leaf < n && weight[leaf] <= weight[inner])
                    ? leaf++ : inner++;
                sum += weight[pick];
                parent[pick] = (uint16_t)end;
            }
            weight[end++] = sum;
        }
        uint8_t depth[512];
        int deepest = 0;
        depth[end - 1] = 0;
        for (int i = end - 2; i >= 0; i--) {
            depth[i] = (uint8_t)(depth[parent[i]] + 1);
            if (i < n && depth[i] > deepest)
                deepest = depth[i];
        }
        if (deepest <= SHORT) {
            memset(code->length, 0, sizeof code->length);
            for (int i = 0; i < n; i++)
                code->length[symbol[i]] = depth[i];
            return;
        }
    }
}

/* Canonical codes, least significant bit first. CORRUPT where the lengths are no full code. */
static int assign_codes(Code *code)
{
    uint32_t next[LIMIT + 2] = {0}, full = 0;
    for (int s = 0; s < 256; s++)
        if (code->length[s]) {
            next[code->length[s] + 1]++;
            full += (uint32_t)SLOTS >> code->length[s];
        }
    if (full != SLOTS)
        return CORRUPT;
    for (int n = 1; n <= LIMIT; n++)
        next[n] = n == 1 ? 0 : (next[n - 1] + next[n]) << 1;
    for (int s = 0; s < 256; s++) {
        int n = code->length[s];
        if (!n)
            continue;
        uint32_t v = next[n]++, flipped = 0;
        for (int i = 0; i < n; i++)
            flipped |= (v >> i & 1) << (n - 1 - i);
        code->code[s] = (uint16_t)flipped;
    }
    return 0;
}

/* Bits of `in`; there is room for LIMIT bits a symbol and eight bytes more. Its end. */
static uint8_t *write_stream(const uint8_t *in, size_t n, const Code *code, uint8_t *out)
{
    uint32_t table[256];
    for (int s = 0; s < 256; s++)
        table[s] = (uint32_t)code->code[s] << 8 | code->length[s];
    uint64_t bits = 0;
    unsigned have = 0;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint32_t a = table[in[i]], b = table[in[i + 1]], c = table[in[i + 2]], d = table[in[i + 3]];
        unsigned na = a & 255, nb = b & 255, nc = c & 255;
        uint64_t low = a >> 8 | (uint64_t)(b >> 8) << na;
        uint64_t high = c >> 8 | (uint64_t)(d >> 8) << nc;
        bits |= (low | high << (na + nb)) << have;
        have += na + nb + nc + (d & 255);
        store64(out, bits);
        out += have >> 3;
        bits >>= have & 56;
        have &= 7;
    }
    for (; i < n; i++) {
        bits |= (uint64_t)(table[in[i]] >> 8) << have;
        have += table[in[i]] & 255;
    }
    store64(out, bits);
    return out + (have + 7) / 8;
}

/* Slot: first symbol | second << 8 | bits of both << 16 | how many << 24 | bits of the first << 28.
 * Slots of `longest` bits. */
static void read_table(const Code *code, unsigned longest, uint32_t *table)
{
    uint16_t one[SLOTS];
    uint32_t slots = 1u << longest;
    for (int s = 0; s < 256; s++) {
        int n = code->length[s];
        if (n)
            for (uint32_t at = code->code[s]; at < slots; at += 1u << n)
                one[at] = (uint16_t)(s | n << 8);
    }
    for (uint32_t at = 0; at < slots; at++) {
        uint32_t n = one[at] >> 8, next = one[at >> n], m = next >> 8;
        uint32_t first = one[at] & 255;
        table[at] = n + m <= longest
            ? first | (next & 255) << 8 | (n + m) << 16 | 2u << 24 | n << 28
            : first | n << 16 | 1u << 24 | n << 28;
    }
}

typedef struct {
    const uint8_t *in, *end;
    uint8_t *out, *out_end;
    uint64_t bits;
    unsigned have;
} Reader;

/* The last bytes of a stream, one symbol at a time, nothing read or written outside. */
static int finish_stream(Reader *r, const uint32_t *table, uint32_t mask)
{
    while (r->out < r->out_end) {
        while (r->have <= 56 && r->in < r->end) {
            r->bits |= (uint64_t)*r->in++ << r->have;
            r->have += 8;
        }
        uint32_t slot = table[r->bits & mask];
        unsigned n = slot >> 28;
        if (n > r->have)
            return CORRUPT;
        *r->out++ = (uint8_t)slot;
        r->bits >>= n;
        r->have -= n;
    }
    return r->in == r->end && r->have < 8 && r->bits == 0 ? 0 : CORRUPT;
}

#define REFILL(k) \
    do { \
        r##k.bits |= load64(r##k.in) << r##k.have; \
        r##k.in += (63 - r##k.have) >> 3; \
        r##k.have |= 56; \
    } while (0)
#define TAKE(k) \
    do { \
        uint32_t slot = t##k[r##k.bits & mask]; \
        unsigned n = slot >> 16 & 255; \
        memcpy(r##k.out, &slot, 2); \
        r##k.out += slot >> 24 & 15; \
        r##k.bits >>= n; \
        r##k.have -= n; \
    } while (0)
/* A round takes five slots of a stream: at most ten symbols, 55 bits. */
#define ROOM(k) (r##k.end - r##k.in >= 8 && r##k.out_end - r##k.out >= 11)

static int read_streams(Reader *r, uint32_t (*t)[SLOTS], uint32_t mask)
{
    Reader r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
    const uint32_t *t0 = t[0], *t1 = t[1], *t2 = t[2], *t3 = t[3];
    while (ROOM(0) && ROOM(1) && ROOM(2) && ROOM(3)) {
        REFILL(0); REFILL(1); REFILL(2); REFILL(3);
        for (int i = 0; i < 5; i++) {
            TAKE(0); TAKE(1); TAKE(2); TAKE(3);
        }
    }
#define REST(k) \
    do { \
        while (ROOM(k)) { \
            REFILL(k); \
            for (int i = 0; i < 5; i++) \
                TAKE(k); \
        } \
        /* A refill may have taken bits of a byte that it has not counted. */ \
        if (r##k.have < 64) \
            r##k.bits &= ((uint64_t)1 << r##k.have) - 1; \
        if (finish_stream(&r##k, t##k, mask)) \
            return CORRUPT; \
    } while (0)
    REST(0); REST(1); REST(2); REST(3);
    return 0;
}

/* `scratch`: two bytes an item and 16 a class. `room` is less than the raw size. */
ptrdiff_t exponent_encode(const uint8_t *src, size_t rows, size_t cols, size_t item, uint8_t *dst,
                          size_t room, uint8_t *scratch)
{
    size_t n = rows * cols, rest = n * (item - 1), width[CLASSES];
    if (n == 0 || cols < CLASSES || cols > 8192 || rows > 65535)
        return NO_GAIN;
    uint32_t sums[8192];
    uint16_t order[8192];
    uint8_t *top = scratch, *sorted = scratch + n;
    Code codes[CLASSES];
    size_t need = cols + CLASSES * (1 + 2 + 128 + 4);
    if (room < need + rest)
        return NO_GAIN;
    /* The other bytes go to the end of the room at first. */
    uint8_t *tail = dst + room - rest;
    if (item == 2)
        split2(src, n, top, tail);
    else
        split4(src, n, top, tail);
    column_sums(top, rows, cols, sums);
    rank_columns(sums, cols, order, dst);
    class_order(dst, cols, order, width);
    uint8_t *out = dst + cols, *modes = out, *in = sorted;
    out += CLASSES;
    uint64_t total = 0;
    const uint16_t *at = order;
    for (int k = 0; k < CLASSES; at += width[k], in += rows * width[k], k++) {
        Code *code = &codes[k];
        size_t size = rows * width[k];
        gather(top, rows, cols, at, width[k], in);
        count(in, size, code);
        modes[k] = code->used == 1 ? SINGLE : CODED;
        if (modes[k] == SINGLE)
            continue;
        assign_lengths(code);
        assign_codes(code);
        uint64_t bits = 0;
        for (int s = code->low; s <= code->high; s++)
            bits += (uint64_t)code->count[s] * code->length[s];
        if (bits / 8 + 130 >= size) {
            modes[k] = STORED;
            total += size;
            continue;
        }
        total += bits / 8 + 1;
        *out++ = (uint8_t)code->low;
        *out++ = (uint8_t)code->high;
        for (int s = code->low; s <= code->high; s += 2)
            *out++ = (uint8_t)(code->length[s] | (s < code->high ? code->length[s + 1] : 0) << 4);
    }
    uint8_t *sizes = out;
    out += 4 * CLASSES;
    if ((uint64_t)(out - dst) + total + 16 + rest >= room)
        return NO_GAIN;
    in = sorted;
    for (int k = 0; k < CLASSES; in += rows * width[k], k++) {
        uint8_t *from = out;
        if (modes[k] == CODED)
            out = write_stream(in, rows * width[k], &codes[k], out);
        else if (modes[k] == SINGLE)
            *out++ = in[0];
        else {
            memcpy(out, in, rows * width[k]);
            out += rows * width[k];
        }
        store32(sizes + 4 * k, (uint32_t)(out - from));
    }
    memmove(out, tail, rest);
    return out + rest - dst;
}

int exponent_decode(const uint8_t *src, size_t size, size_t rows, size_t cols, size_t item,
                    uint8_t *dst, uint8_t *scratch)
{
    size_t n = rows * cols, rest = n * (item - 1), width[CLASSES];
    if (n == 0 || cols < CLASSES || cols > 8192 || rows > 65535)
        return CORRUPT;
    const uint8_t *at = src, *end = src + size;
    uint16_t order[8192];
    uint32_t tables[CLASSES][SLOTS];
    uint8_t *top = scratch, *sorted = scratch + n;
    if ((size_t)(end - at) < cols + CLASSES || class_order(at, cols, order, width))
        return CORRUPT;
    const uint8_t *modes = at + cols;
    at = modes + CLASSES;
    Code codes[CLASSES];
    unsigned longest = 1;
    for (int k = 0; k < CLASSES; k++) {
        if (modes[k] > SINGLE)
            return CORRUPT;
        if (modes[k] != CODED) {
            memset(tables[k], 0, sizeof tables[k]);
            continue;
        }
        Code *code = &codes[k];
        memset(code->length, 0, sizeof code->length);
        if (end - at < 2)
            return CORRUPT;
        int low = *at++, high = *at++;
        if (low >= high || end - at < (high - low) / 2 + 1)
            return CORRUPT;
        for (int s = low; s <= high; s += 2) {
            uint8_t two = *at++;
            code->length[s] = two & 15;
            if (s < high)
                code->length[s + 1] = two >> 4;
            else if (two >> 4)
                return CORRUPT;
            if ((two & 15) > LIMIT || two >> 4 > LIMIT)
                return CORRUPT;
            longest = (two & 15) > (int)longest ? two & 15u : longest;
            longest = two >> 4 > (int)longest ? two >> 4u : longest;
        }
        if (assign_codes(code))
            return CORRUPT;
    }
    for (int k = 0; k < CLASSES; k++)
        if (modes[k] == CODED)
            read_table(&codes[k], longest, tables[k]);
    if (end - at < 4 * CLASSES)
        return CORRUPT;
    const uint8_t *sizes = at;
    at += 4 * CLASSES;
    Reader readers[CLASSES];
    uint8_t *out = sorted;
    for (int k = 0; k < CLASSES; k++) {
        size_t wants = rows * width[k], has = load32(sizes + 4 * k);
        if ((size_t)(end - at) < has)
            return CORRUPT;
        readers[k] = (Reader){.in = at, .end = at + has, .out = out, .out_end = out + wants};
        if (modes[k] != CODED) {
            if (modes[k] == SINGLE ? has != 1 : has != wants)
                return CORRUPT;
            if (modes[k] == SINGLE)
                memset(out, *at, wants);
            else
                memcpy(out, at, wants);
            readers[k].out = out + wants;
            readers[k].in = readers[k].end;
        }
        at += has;
        out += wants;
    }
    if (read_streams(readers, tables, (1u << longest) - 1) || (size_t)(end - at) != rest)
        return CORRUPT;
    const uint16_t *columns = order;
    const uint8_t *in = sorted;
    for (int k = 0; k < CLASSES; columns += width[k], in += rows * width[k], k++)
        scatter(in, rows, cols, columns, width[k], top);
    if (item == 2)
        merge2(top, at, n, dst);
    else
        merge4(top, at, n, dst);
    return 0;
}

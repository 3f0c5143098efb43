/* Runs kernels/cpu on random shapes without Python, each array in memory of exactly its size.
 *
 *     driver heap|fenced|short SEED ROUNDS
 *
 * `heap` is for the sanitizers; `fenced` puts each array before a page that cannot be read, since
 * loads under a mask are not instrumented; `short` makes outputs four bytes too small. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "layers.h"

#define ARRAYS_MAX 512

static struct {
    void *at;
    size_t bytes;
} arrays[ARRAYS_MAX];
static int count, fenced;
static size_t missing;
static unsigned long state;

static unsigned random_below(unsigned n) {
    state = state * 6364136223846793005ul + 1442695040888963407ul;
    return (unsigned)(state >> 33) % n;
}

static float random_float(void) { return (float)random_below(20001) / 10000.0f - 1.0f; }

static void *array(size_t bytes) {
    void *at;
    if (count == ARRAYS_MAX)
        abort();
    if (fenced) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
        char *map = mmap(NULL, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                         -1, 0);
        if (map == MAP_FAILED || mprotect(map + whole, page, PROT_NONE))
            abort();
        arrays[count].at = map;
        arrays[count].bytes = whole + page;
        at = map + whole - bytes;
    } else {
        at = arrays[count].at = malloc(bytes);
        if (!at)
            abort();
    }
    count++;
    return at;
}

static void free_all(void) {
    while (count--)
        if (fenced)
            munmap(arrays[count].at, arrays[count].bytes);
        else
            free(arrays[count].at);
    count = 0;
}

static float *floats(long n, float size) {
    float *at = array(n * sizeof(float));
    for (long i = 0; i < n; i++)
        at[i] = size * random_float();
    return at;
}

static double half(unsigned bits) {
    int exponent = bits >> 10 & 31, sign = bits >> 15 ? -1 : 1;
    double mantissa = bits & 1023;
    return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

/* A small FP16 number of either sign, below 1. */
static unsigned some_half(void) { return random_below(2) << 15 | random_below(15 << 10); }

/* 0, the least subnormal, one near the greatest, or a plain one. */
static unsigned some_scale(void) {
    const unsigned odd[] = {0, 0x8000, 1, 0x8001, 0x3ff, 0x400};
    return random_below(3) ? 0x1c00 + random_below(0x800) : odd[random_below(6)];
}

/* Weights of a random form, or of one with `form` 0 (FP16), 1 (minima) or 2 (zero points). */
static struct weights weights(long rows, long k, int form) {
    struct weights w = {.rows = rows, .k = k};
    if (form == 0) {
        uint16_t *values = array(rows * k * 2);
        for (long i = 0; i < rows * k; i++)
            values[i] = (uint16_t)some_half();
        w.halves = values;
        return w;
    }
    w.group_log2 = 5 + (int)random_below(3);
    w.zeros = form == 2;
    long groups = (k + (1L << w.group_log2) - 1) >> w.group_log2;
    uint8_t *codes = array(rows * k / 2);
    uint32_t *meta = array(rows * groups * 4);
    for (long i = 0; i < rows * k / 2; i++)
        codes[i] = (uint8_t)random_below(256);
    const unsigned zeros[] = {0, 0x4b80, 0x4800, 0x4b00, 0x3c00}; /* 0, 15, 8, 14, 1 */
    for (long i = 0; i < rows * groups; i++)
        meta[i] = some_scale() | (w.zeros ? zeros[random_below(5)] : some_half()) << 16;
    w.codes = codes;
    w.meta = meta;
    return w;
}

static double weight(const struct weights *w, long row, long at) {
    if (w->halves)
        return half(w->halves[row * w->k + at]);
    long groups = (w->k + (1L << w->group_log2) - 1) >> w->group_log2;
    unsigned meta = w->meta[row * groups + (at >> w->group_log2)];
    unsigned byte = w->codes[(row * w->k + at / 32 * 32) / 2 + at % 16];
    double code = at % 32 < 16 ? byte & 15 : byte >> 4;
    double scale = half(meta & 0xffff), offset = half(meta >> 16);
    return w->zeros ? (code - offset) * scale : code * scale + offset;
}

static int wrong(const char *what, double got, double exact, double size) {
    if (fabs(got - exact) <= size)
        return 0;
    fprintf(stderr, "%s: %.9g, not %.9g\n", what, got, exact);
    return 1;
}

static int products(void) {
    long rows = 1 + random_below(70), k = 32 * (1 + random_below(20)), m = 1 + random_below(40);
    int threads = 1 + (int)random_below(3), bad = 0;
    struct weights w = weights(rows, k, (int)random_below(3));
    float *x = floats(m * k, 1), *y = array(m * rows * sizeof(float) - missing);
    float *whole = array(rows * k * sizeof(float));
    products_unpack(&w, whole, threads);
    if (products_linear(&w, x, y, m, threads))
        return 1;
    for (long i = 0; i < m && !missing; i++)
        for (long row = 0; row < rows; row++) {
            double exact = 0, squares = 0, of_x = 0;
            for (long at = 0; at < k; at++) {
                double value = weight(&w, row, at), given = x[i * k + at];
                exact += value * given;
                squares += value * value;
                of_x += given * given;
                if (!i)
                    bad += wrong("weight", whole[row * k + at], value, 1e-6 * fabs(value) + 1e-6);
            }
            bad += wrong("product", y[i * rows + row], exact, 1e-4 * sqrt(squares * of_x) + 1e-5);
        }
    return bad;
}

static int layers(void) {
    long heads_each = 1 + random_below(6), kv_heads = 1 + random_below(3);
    long dim = 16 * (1 + random_below(8)), heads = 2 * heads_each * kv_heads;
    long m = 1 + random_below(32), tokens = 1 + random_below(16), start = random_below(120);
    long width = heads * dim, qkv = width + 2 * kv_heads * dim, blocks = 160 / tokens + 1;
    struct stack s = {.count = 1 + random_below(2), .hidden = 32 * (1 + random_below(5)),
                      .heads = heads, .kv_heads = kv_heads, .dim = dim, .eps = 1e-5f};
    long gates = 32 * (1 + random_below(6));
    struct layer l[2];
    struct weights w[2][4];
    for (long i = 0; i < s.count; i++) {
        w[i][0] = weights(qkv, s.hidden, (int)random_below(3));
        w[i][1] = weights(s.hidden, width, (int)random_below(3));
        w[i][2] = weights(2 * gates, s.hidden, (int)random_below(3));
        w[i][3] = weights(s.hidden, gates, (int)random_below(3));
        l[i] = (struct layer){&w[i][0], &w[i][1], &w[i][2], &w[i][3], floats(s.hidden, 1),
                              floats(s.hidden, 1), random_below(2) ? floats(qkv, 1) : NULL};
    }
    s.layers = l;
    if (!layers_fit(&s))
        return 1;
    long pool = s.count * 2 * blocks * tokens * kv_heads * dim;
    int64_t *positions = array(m * 8), *offsets = array(m * 8);
    int32_t *tables = array(blocks * 4);
    struct step t = {.m = m, .blocks = blocks, .block_tokens = tokens};
    t.x = floats(m * s.hidden, 1);
    t.cosines = floats(m * dim / 2, 1);
    t.sines = floats(m * dim / 2, 1);
    t.kv = array(pool * 2);
    for (long i = 0; i < pool; i++)
        t.kv[i] = (uint16_t)some_half();
    for (long i = 0; i < blocks; i++)
        tables[i] = (int32_t)(blocks - 1 - i);
    for (long i = 0; i < m; i++) {
        positions[i] = start + i; /* at most 150 of 160: blocks has them */
        offsets[i] = 0;
    }
    t.positions = positions;
    t.offsets = offsets;
    t.tables = tables;
    /* However many threads there are, what comes out is the same. */
    float *alone = array(m * s.hidden * sizeof(float));
    memcpy(alone, t.x, m * s.hidden * sizeof(float));
    struct step again = t;
    again.x = alone;
    if (layers_step(&s, &t, 2 + (int)random_below(2)) || layers_step(&s, &again, 1))
        return 1;
    for (long i = 0; i < m * s.hidden; i++)
        if (!isfinite(t.x[i]) || t.x[i] != alone[i]) {
            fprintf(stderr, "layers: %.9g and %.9g\n", t.x[i], alone[i]);
            return 1;
        }
    return 0;
}

int main(int words, char **word) {
    if (words != 4)
        return 2;
    fenced = !strcmp(word[1], "fenced");
    missing = strcmp(word[1], "short") ? 0 : 4;
    state = strtoul(word[2], NULL, 10);
    if (!products_supported())
        return 77;
    for (long round = strtol(word[3], NULL, 10); round > 0; round--) {
        if (products() || layers()) {
            fprintf(stderr, "%ld rounds before the last\n", round);
            return 1;
        }
        free_all();
    }
    return 0;
}

/* One parallel region for all layers, of six phases each: what a phase needs is computed again by
 * each thread where that is cheap (norms, rounding), and shared where it is not. */
#include "layers.h"

#if defined(__x86_64__)

#include <omp.h>
#include <stdlib.h>

#include "attention.h"
#include "team.h"
#include "tiles.h"

#define PHASES 6

int layers_fit(const struct stack *s) {
    long width = s->heads * s->dim, kv = s->kv_heads * s->dim;
    if (s->count < 1 || s->hidden < 32 || s->hidden % 32 || s->heads < 1 || s->kv_heads < 1
        || s->heads % s->kv_heads || s->dim < 16 || s->dim % 16 || s->dim > DIM_MAX)
        return 0;
    for (long i = 0; i < s->count; i++) {
        const struct layer *l = &s->layers[i];
        if (l->qkv->k != s->hidden || l->qkv->rows != width + 2 * kv || l->out->k != width
            || l->out->rows != s->hidden || l->gate_up->k != s->hidden
            || l->gate_up->rows != 2 * l->down->k || l->down->rows != s->hidden)
            return 0;
    }
    return 1;
}

/* A call's memory: what threads share, and what each has for itself. */
struct room {
    struct phase *phases;
    float *qkv, *attended, *middle;
    char *own;
    size_t norm_bytes, own_bytes;
};

static int make_room(const struct stack *s, long m, int threads, struct room *room, void **all) {
    long widest = s->hidden > s->heads * s->dim ? s->hidden : s->heads * s->dim, gates = 0;
    for (long i = 0; i < s->count; i++)
        gates = s->layers[i].down->k > gates ? s->layers[i].down->k : gates;
    size_t phases = sizeof(struct phase) * PHASES * s->count;
    size_t qkv = m * (s->heads + 2 * s->kv_heads) * s->dim, attended = m * s->heads * s->dim;
    room->norm_bytes = ((size_t)m * s->hidden * sizeof(float) + 63) / 64 * 64;
    size_t rows = rows_room(gates > widest ? gates : widest);
    room->own_bytes = room->norm_bytes + (rows + 63) / 64 * 64;
    size_t shared = (phases + (qkv + attended + m * gates) * sizeof(float) + 63) / 64 * 64;
    if (posix_memalign(all, 64, shared + room->own_bytes * threads))
        return -1;
    room->phases = *all;
    for (long i = 0; i < PHASES * s->count; i++)
        room->phases[i] = (struct phase){0};
    room->qkv = (float *)((char *)*all + phases);
    room->attended = room->qkv + qkv;
    room->middle = room->attended + attended;
    room->own = (char *)*all + shared;
    return 0;
}

/* y (+)= x times w, after a norm where `norm` is given; with `paired`, y = silu(gates) * ups. */
static void product(const struct stack *s, const struct weights *w, struct phase *phase,
                    const float *x, const float *norm, float *y, long m, int paired, int add,
                    struct room *room, char *own) {
    long outputs = paired ? w->rows / 2 : w->rows, step = tiles_piece(w), piece;
    if (paired && step > GATES_MAX)
        step = GATES_MAX;
    long pieces = (outputs + step - 1) / step;
    struct rows rows = {0};
    while ((piece = phase_take(phase, pieces)) >= 0) {
        /* Not before a piece is taken: until it is done, nobody changes what is read here. */
        if (!rows.m) {
            if (norm) {
                rows_norm(x, norm, (float *)own, m, s->hidden, s->eps);
                x = (float *)own;
            }
            tiles_ready(w, &rows, x, m, own + room->norm_bytes);
        }
        long first = piece * step, last = first + step < outputs ? first + step : outputs;
        if (paired)
            tiles_gates(w, &rows, first, last, y + first, outputs);
        else
            tiles_product(w, &rows, first, last, y + first, outputs, add);
        phase_done(phase);
    }
    phase_wait(phase, pieces);
}

static void attention(const struct stack *s, const struct step *t, long index, struct phase *phases,
                      struct room *room) {
    long row = (s->heads + 2 * s->kv_heads) * s->dim, piece;
    long pool = t->blocks * t->block_tokens * s->kv_heads * s->dim;
    struct attention a = {.heads = s->heads, .kv_heads = s->kv_heads, .dim = s->dim,
                          .block_tokens = t->block_tokens};
    a.keys = t->kv + 2 * index * pool;
    a.values = a.keys + pool;
    while ((piece = phase_take(&phases[0], t->m)) >= 0) {
        attention_keep(&a, room->qkv + piece * row, s->layers[index].qkv_bias,
                       t->cosines + piece * s->dim / 2, t->sines + piece * s->dim / 2,
                       t->tables + t->offsets[piece], t->positions[piece]);
        phase_done(&phases[0]);
    }
    phase_wait(&phases[0], t->m);
    while ((piece = phase_take(&phases[1], t->m * s->kv_heads)) >= 0) {
        long i = piece / s->kv_heads;
        attention_attend(&a, room->qkv + i * row, t->tables + t->offsets[i], t->positions[i],
                         piece % s->kv_heads, room->attended + i * s->heads * s->dim);
        phase_done(&phases[1]);
    }
    phase_wait(&phases[1], t->m * s->kv_heads);
}

static void layers(const struct stack *s, const struct step *t, struct room *room, char *own) {
    struct phase *phase = room->phases;
    for (long i = 0; i < s->count; i++, phase += PHASES) {
        const struct layer *l = &s->layers[i];
        product(s, l->qkv, &phase[0], t->x, l->attn_norm, room->qkv, t->m, 0, 0, room, own);
        attention(s, t, i, phase + 1, room);
        product(s, l->out, &phase[3], room->attended, NULL, t->x, t->m, 0, 1, room, own);
        product(s, l->gate_up, &phase[4], t->x, l->ffn_norm, room->middle, t->m, 1, 0, room, own);
        product(s, l->down, &phase[5], room->middle, NULL, t->x, t->m, 0, 1, room, own);
    }
}

int layers_step(const struct stack *s, const struct step *step, int threads) {
    struct room room;
    void *all;
    if (make_room(s, step->m, threads, &room, &all))
        return -1;
#pragma omp parallel num_threads(threads)
    layers(s, step, &room, room.own + room.own_bytes * omp_get_thread_num());
    free(all);
    return 0;
}

#else

int layers_fit(const struct stack *s) {
    (void)s;
    return 0;
}
int layers_step(const struct stack *s, const struct step *step, int threads) {
    (void)s, (void)step, (void)threads;
    return -1;
}

#endif

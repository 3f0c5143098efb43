/* Products on several threads. Threads are OpenMP's, as torch's are: one pool for both, or two
 * pools would spin against each other (agent/engine/threads.py). */
#include "products.h"

#if defined(__x86_64__)

#include <omp.h>
#include <stdlib.h>

#include "team.h"
#include "tiles.h"

int products_supported(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
           && __builtin_cpu_supports("f16c");
}

/* What m rows times w are in pieces: for each M_MAX rows of x, pieces of w's rows. */
struct work {
    const struct weights *w;
    long m, rows, step, across;
};

static struct work work_of(const struct weights *w, long m, int paired) {
    struct work work = {.w = w, .m = m, .rows = paired ? w->rows / 2 : w->rows};
    work.step = tiles_piece(w);
    if (paired && work.step > GATES_MAX)
        work.step = GATES_MAX;
    work.across = (work.rows + work.step - 1) / work.step;
    return work;
}

static long pieces_of(const struct work *work) {
    return work->across * ((work->m + M_MAX - 1) / M_MAX);
}

/* Take pieces until there are none; `paired`: gates and ups. */
static void share(const struct work *work, struct phase *phase, const float *x, float *y,
                  int paired, char *room) {
    long pieces = pieces_of(work), ready = -1, piece;
    struct rows rows;
    while ((piece = phase_take(phase, pieces)) >= 0) {
        long at = piece / work->across * M_MAX, first = piece % work->across * work->step;
        long last = first + work->step < work->rows ? first + work->step : work->rows;
        if (at != ready) {
            long m = work->m - at < M_MAX ? work->m - at : M_MAX;
            tiles_ready(work->w, &rows, x + at * work->w->k, m, room);
            ready = at;
        }
        float *to = y + at * work->rows;
        if (paired)
            tiles_gates(work->w, &rows, first, last, to + first, work->rows);
        else
            tiles_product(work->w, &rows, first, last, to + first, work->rows, 0);
        phase_done(phase);
    }
    phase_wait(phase, pieces);
}

int products_linear(const struct weights *w, const float *x, float *y, long m, int threads) {
    struct work work = work_of(w, m, 0);
    struct phase phase = {0};
    size_t room = rows_room(w->k);
    char *rooms = malloc(room * threads);
    if (!rooms)
        return -1;
#pragma omp parallel num_threads(threads)
    share(&work, &phase, x, y, 0, rooms + room * omp_get_thread_num());
    free(rooms);
    return 0;
}

int products_ffn(const struct weights *wide, const struct weights *narrow, const float *x,
                 float *middle, float *y, long m, int threads) {
    struct work gates = work_of(wide, m, 1), down = work_of(narrow, m, 0);
    struct phase phases[2] = {0};
    size_t room = rows_room(wide->k > narrow->k ? wide->k : narrow->k);
    char *rooms = malloc(room * threads);
    if (!rooms)
        return -1;
#pragma omp parallel num_threads(threads)
    {
        char *own = rooms + room * omp_get_thread_num();
        share(&gates, &phases[0], x, middle, 1, own);
        share(&down, &phases[1], middle, y, 0, own);
    }
    free(rooms);
    return 0;
}

void products_unpack(const struct weights *w, float *out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        long mine = omp_get_thread_num(), all = omp_get_num_threads();
        long first = w->rows * mine / all, last = w->rows * (mine + 1) / all;
        tiles_unpack(w, first, last, out + first * w->k);
    }
}

#else

int products_supported(void) { return 0; }
int products_linear(const struct weights *w, const float *x, float *y, long m, int threads) {
    (void)w, (void)x, (void)y, (void)m, (void)threads;
    return -1;
}
int products_ffn(const struct weights *wide, const struct weights *narrow, const float *x,
                 float *middle, float *y, long m, int threads) {
    (void)wide, (void)narrow, (void)x, (void)middle, (void)y, (void)m, (void)threads;
    return -1;
}
void products_unpack(const struct weights *w, float *out, int threads) {
    (void)w, (void)out, (void)threads;
}

#endif

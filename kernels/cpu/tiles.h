/* Products of prepared rows with some rows of small weights, on one thread. */
#ifndef TONGGUAN_CPU_TILES_H
#define TONGGUAN_CPU_TILES_H

#include "products.h"
#include "rows.h"

/* Gates that `tiles_gates` takes at a time. */
#define GATES_MAX 64

/* How many rows of w make a piece of work: some 32 KiB, in twelves. */
long tiles_piece(const struct weights *w);

/* Make x [m, w->k] ready for products with w; `room` is what rows_room(w->k) asks for. */
void tiles_ready(const struct weights *w, struct rows *rows, const float *x, long m, void *room);

/* y[i * stride + row - first] = x[i] times that row of w, for rows `first` to before `last`; with
 * `add` it is added to what is there. */
void tiles_product(const struct weights *w, const struct rows *x, long first, long last, float *y,
                   long stride, int add);

/* middle[i * stride + f - first] = silu(gate f) * up f, for gates `first` to before `last`, at most
 * GATES_MAX of them; w holds all gates, then all ups. */
void tiles_gates(const struct weights *w, const struct rows *x, long first, long last,
                 float *middle, long stride);

/* out [last - first, k] = those rows of w in FP32. */
void tiles_unpack(const struct weights *w, long first, long last, float *out);

#endif

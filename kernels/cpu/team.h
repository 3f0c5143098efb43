/* Work shared by threads in phases, of pieces that each takes when it is free.
 *
 * A phase ends when its pieces are done, not when all threads have come: one that another process
 * keeps from running holds up the rest by the piece it has, and finds nothing left of what it
 * missed. Who has a piece keeps the phase open, so what a phase reads may be read until then. */
#ifndef TONGGUAN_CPU_TEAM_H
#define TONGGUAN_CPU_TEAM_H

#include <immintrin.h>
#include <sched.h>

/* Turns of waiting, some 100 us, before the core is offered to others. */
#define TURNS 4000

/* Zero at the start; each count in a cache line of its own. */
struct phase {
    long next, room[7];
    long done, more[7];
};

/* Return the next of `pieces`, or -1. */
static inline long phase_take(struct phase *phase, long pieces) {
    long piece = __atomic_fetch_add(&phase->next, 1, __ATOMIC_RELAXED);
    return piece < pieces ? piece : -1;
}

static inline void phase_done(struct phase *phase) {
    __atomic_fetch_add(&phase->done, 1, __ATOMIC_RELEASE);
}

/* Wait for all pieces; what was written for them is seen after. */
static inline void phase_wait(const struct phase *phase, long pieces) {
    for (int turn = 0; __atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) < pieces; turn++)
        if (turn < TURNS)
            _mm_pause();
        else
            sched_yield();
}

#endif

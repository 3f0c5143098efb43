// The fibers under host_shim.h: one for each thread of a block, on stacks of their own.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {

constexpr int THREADS_MAX = 1024, STACK_BYTES = 64 << 10, COPIES_MAX = 64;
constexpr u32 SHARED_BYTES_MAX = 227 << 10;  // what a block may ask of an sm_90

enum State { RUNS, AT_BARRIER, AT_WARP, DONE };

struct Dim {
    u32 x;
};
struct Grid {
    u32 x, y, z;
};
struct Index {
    u32 x;
};
struct Copy {
    u8 *to;
    const u8 *from;
    int bytes, group;
};
struct Fiber {
    void *stack_pointer;
    State state;
    u32 collectives;
    int copies, commits;
    Copy copy[COPIES_MAX];
    u8 *stack;
    void *fake;
};
struct Block {
    Grid index, grid;
    u32 threads;
    u8 *shared;
};

static Block block;
static Fiber fibers[THREADS_MAX];
static u32 boards[THREADS_MAX / 32][2][32 * 6];
static int self;
static void *scheduler;
static const char *problem;
static void (*body)(void *);
static void *body_context;
#if defined(__SANITIZE_ADDRESS__)
static const void *home_stack;
static std::size_t home_bytes;
#endif

#if defined(__x86_64__)
// Saves what the calling convention preserves on this stack and goes on with the other. A system
// call for each switch, as `swapcontext` makes, would be most of a test's time.
extern "C" void shim_switch(void **from, void *to);
asm(R"(
.pushsection .text
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, . - shim_switch
.popsection
)");

static void *prepare(Fiber &f, void (*entry)()) {
    void **top = (void **)(f.stack + STACK_BYTES) - 1;  // as a call leaves it: 8 past 16
    *--top = (void *)entry;  // where `ret` goes
    for (int i = 0; i < 6; i++)
        *--top = nullptr;
    return top;
}
#else
static ucontext_t contexts[THREADS_MAX + 1];

static void shim_switch(void **from, void *to) {
    ucontext_t *here = *from ? (ucontext_t *)*from : &contexts[THREADS_MAX];
    *from = here;
    swapcontext(here, (ucontext_t *)to);
}

static void *prepare(Fiber &f, void (*entry)()) {
    ucontext_t *c = &contexts[&f - fibers];
    getcontext(c);
    c->uc_stack.ss_sp = f.stack;
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
    return c;
}
#endif

static void leave(State state) {
    Fiber &f = fibers[self];
    f.state = state;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(state == DONE ? nullptr : &f.fake, home_stack, home_bytes);
#endif
    shim_switch(&f.stack_pointer, scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f.fake, &home_stack, &home_bytes);
#endif
}

static void wait(State state) { leave(state); }

// A fault of the kernel: its thread stops here, and so does the launch.
static void fail(const char *what) {
    problem = what;
    leave(DONE);
}

static void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &home_stack, &home_bytes);
#endif
    body(body_context);
    if (fibers[self].copies)
        problem = "a thread ended with copies under way that it never waited for";
    leave(DONE);
}

static void resume(int thread) {
    self = thread;
    Fiber &f = fibers[thread];
    f.state = RUNS;
#if defined(__SANITIZE_ADDRESS__)
    void *fake;
    __sanitizer_start_switch_fiber(&fake, f.stack, STACK_BYTES);
#endif
    shim_switch(&scheduler, f.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

// How many of the threads from `first` are in `state`.
static u32 count(u32 first, u32 threads, State state) {
    u32 n = 0;
    for (u32 i = first; i < first + threads; i++)
        n += fibers[i].state == state;
    return n;
}

// Runs one warp until all its lanes stand at the block's barrier or are done.
static void run_warp(u32 first, int falling) {
    for (bool all = true; !problem; all = false) {
        u32 waiting = count(first, 32, AT_WARP);
        if (!all && waiting == 0)
            return;
        if (!all && waiting != 32) {
            problem = "a warp's collective was not reached by all of its lanes";
            return;
        }
        for (int i = 0; i < 32 && !problem; i++) {
            int lane = falling ? 31 - i : i;
            if (fibers[first + lane].state != DONE)
                resume(first + lane);
        }
    }
}

static void run_block(int falling) {
    u32 warps = block.threads / 32;
    for (u32 i = 0; i < block.threads; i++) {
        Fiber &f = fibers[i];
        f.state = RUNS;
        f.collectives = f.copies = f.commits = 0;
        f.stack_pointer = prepare(f, entry);
    }
    while (!problem) {
        for (u32 i = 0; i < warps && !problem; i++)
            run_warp((falling ? warps - 1 - i : i) * 32, falling);
        u32 done = count(0, block.threads, DONE);
        if (done == block.threads)
            return;
        if (done && !problem)
            problem = "a barrier was not reached by all threads of the block";
    }
}

static const char *run(const u32 *grid, u32 threads, u32 shared_bytes, int falling,
                       void (*kernel)(void *), void *context) {
    if (!threads || threads % 32 || threads > THREADS_MAX)
        return "threads of a block: whole warps, at most 1024";
    if (shared_bytes > SHARED_BYTES_MAX)
        return "more shared memory than a block can have";
    for (u32 i = 0; i < threads; i++)
        if (!fibers[i].stack)
            fibers[i].stack = (u8 *)std::malloc(STACK_BYTES);
    u8 *shared = (u8 *)std::aligned_alloc(16, (shared_bytes + 31) / 16 * 16);
    body = kernel;
    body_context = context;
    problem = nullptr;
    block = {{}, {grid[0], grid[1], grid[2]}, threads, shared};
    for (block.index.z = 0; block.index.z < grid[2]; block.index.z++)
        for (block.index.y = 0; block.index.y < grid[1]; block.index.y++)
            for (block.index.x = 0; block.index.x < grid[0] && !problem; block.index.x++) {
                std::memset(shared, 0xff, shared_bytes);
                run_block(falling);
            }
    std::free(shared);
    return problem;
}

}  // namespace shim

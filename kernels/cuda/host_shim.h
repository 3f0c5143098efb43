// Runs the kernels of this folder on a CPU, number for number, so that tests need no GPU.
//
// A block's threads are fibers of one system thread. A fiber runs until a barrier or a warp's
// collective and then waits for its peers. Three things are made worse than on a device on purpose,
// so that a fault shows: shared memory starts as NaN; a `copy_async` arrives at the wait and not
// before; and threads run one after the other, in rising or in falling order, so that a missing
// barrier is read as the wrong value in one of the two. Barriers that not all threads reach end the
// launch with an error.
//
// Not shown here: speed, bank conflicts, the memory model, real races.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "host_fibers.h"

#define DEVICE static inline
#define KERNEL static void
#define BOUNDS(threads, blocks)
#define SHARED(name) u8 *name = shim::block.shared
#define __restrict__
#define __shared__ SHARED_memory_is_taken_by_the_macro

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};

#define threadIdx (shim::Index{(u32)shim::self})
#define blockIdx (shim::block.index)
#define blockDim (shim::Dim{shim::block.threads})
#define gridDim (shim::block.grid)

// --- FP16: computed wider, rounded once, to nearest even ----------------------------------------

namespace shim {

inline float widen(u16 a) {
    u32 sign = (u32)(a & 0x8000) << 16, exponent = a >> 10 & 31, fraction = a & 1023;
    u32 bits;
    if (exponent == 0) {
        float value = std::ldexp((float)fraction, -24);
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline u16 narrow(double a) {
    u16 sign = std::signbit(a) ? 0x8000 : 0;
    double size = std::fabs(a);
    if (size != size)
        return 0x7fff;
    if (size >= 65520.0)  // half way from the greatest finite number to the next
        return sign | 0x7c00;
    int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
    // In units of the last place; `nearbyint` rounds to even.
    double units = std::nearbyint(std::ldexp(size, 10 - exponent));
    return sign | (u16)((exponent + 14) * 1024 + (int)units);
}

// a * b + c to odd: what is lost is kept as the last bit, so that rounding again is rounding once.
inline double fma_odd(double a, double b, double c) {
    double p = a * b, s = p + c, part = s - p;  // halves: the product is exact
    double lost = (p - (s - part)) + (c - part);
    u64 bits;
    std::memcpy(&bits, &s, 8);
    if (lost != 0.0 && lost == lost && !(bits & 1))
        bits += (lost > 0) == (s > 0) ? 1 : -1;
    std::memcpy(&s, &bits, 8);
    return s;
}

template <class F> inline u32 twice(F each, u32 a, u32 b, u32 c = 0) {
    auto half = [&](int shift) {
        return (u32)narrow(each(widen((u16)(a >> shift)), widen((u16)(b >> shift)),
                                widen((u16)(c >> shift))))
               << shift;
    };
    return half(0) | half(16);
}

}  // namespace shim

DEVICE u32 h2_add(u32 a, u32 b) {
    return shim::twice([](double x, double y, double) { return x + y; }, a, b);
}
DEVICE u32 h2_sub(u32 a, u32 b) {
    return shim::twice([](double x, double y, double) { return x - y; }, a, b);
}
DEVICE u32 h2_fma(u32 a, u32 b, u32 c) { return shim::twice(shim::fma_odd, a, b, c); }
DEVICE float h_to_f(u16 a) { return shim::widen(a); }
DEVICE u16 f_to_h(float a) { return shim::narrow(a); }
DEVICE float fast_exp(float a) { return std::exp(a); }
DEVICE void exact_sincos(float a, float *sine, float *cosine) {
    *sine = std::sin(a);
    *cosine = std::cos(a);
}
DEVICE float inverse_sqrt(float a) { return 1.0f / std::sqrt(a); }
DEVICE u32x4 load_stream(const u32x4 *at) { return *at; }
DEVICE float load_shared_by_blocks(const float *at) { return *at; }

// --- what threads do together --------------------------------------------------------------------

DEVICE void __syncthreads() { shim::wait(shim::AT_BARRIER); }
DEVICE void __syncwarp() { shim::wait(shim::AT_WARP); }
DEVICE void __threadfence() {}

DEVICE u32 atomicAdd(u32 *at, u32 value) {
    u32 before = *at;
    *at += value;
    return before;
}

DEVICE void shim_copy(void *shared, const void *global, bool wanted, int bytes) {
    shim::Fiber &f = shim::fibers[shim::self];
    if (f.copies == shim::COPIES_MAX)
        shim::fail("more copies under way than the shim holds");
    if ((uintptr_t)shared % bytes || (uintptr_t)global % bytes)
        shim::fail("a copy that is not aligned to its size");
    f.copy[f.copies++] = {(u8 *)shared, wanted ? (const u8 *)global : nullptr, bytes, f.commits};
}
DEVICE void copy_async(void *shared, const void *global, bool wanted) {
    shim_copy(shared, global, wanted, 16);
}
DEVICE void copy_async_4(void *shared, const void *global, bool wanted) {
    shim_copy(shared, global, wanted, 4);
}
DEVICE void copy_commit() { shim::fibers[shim::self].commits++; }

template <int PENDING> DEVICE void copy_wait() {
    shim::Fiber &f = shim::fibers[shim::self];
    int kept = 0;
    for (int i = 0; i < f.copies; i++) {
        shim::Copy &c = f.copy[i];
        if (c.group >= f.commits - PENDING)
            f.copy[kept++] = c;
        else if (c.from)
            std::memcpy(c.to, c.from, c.bytes);
        else
            std::memset(c.to, 0, c.bytes);
    }
    f.copies = kept;
}

// Every lane shows 24 bytes, then sees all others'. Two boards in turn: nobody is a whole
// collective ahead of a lane that still reads.
DEVICE const u32 *shim_board(const u32 *mine, int words) {
    shim::Fiber &f = shim::fibers[shim::self];
    u32 *board = shim::boards[shim::self / 32][f.collectives++ % 2];
    std::memcpy(board + shim::self % 32 * 6, mine, 4 * words);
    shim::wait(shim::AT_WARP);
    return board;
}

DEVICE float lane_xor(float value, int mask) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    bits = shim_board(&bits, 1)[((shim::self % 32) ^ mask) * 6];
    std::memcpy(&value, &bits, 4);
    return value;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point types": lane 4g + t holds of A
// the rows g and g + 8 at k 2t, 2t + 1, 2t + 8, 2t + 9, of B the column g at these k, of C the
// rows g and g + 8 at columns 2t and 2t + 1.
DEVICE void mma_16816(float c[4], const u32 a[4], const u32 b[2]) {
    u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    const u32 *board = shim_board(mine, 6);
    int g = shim::self % 32 / 4, t = shim::self % 4;
    for (int out = 0; out < 4; out++) {
        int column = 2 * t + out % 2;
        float sum = 0;
        for (int part = 0; part < 8; part++) {  // lane `part % 4`, the low or the high eight of k
            u32 left = board[(4 * g + part % 4) * 6 + part / 4 * 2 + out / 2];
            u32 right = board[(4 * column + part % 4) * 6 + 4 + part / 4];
            sum += h_to_f((u16)left) * h_to_f((u16)right);
            sum += h_to_f((u16)(left >> 16)) * h_to_f((u16)(right >> 16));
        }
        c[out] += sum;
    }
}

// --- launches ------------------------------------------------------------------------------------

namespace shim {

template <class... A, std::size_t... I>
void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(A *)arguments[I]...);
}

template <class... A> struct Call {
    void (*kernel)(A...);
    void **arguments;
    static void go(void *self) {
        Call *c = (Call *)self;
        call(c->kernel, c->arguments, std::index_sequence_for<A...>{});
    }
};

template <class... A>
const char *launch(void (*kernel)(A...), const u32 *grid, u32 threads, u32 shared_bytes,
                   int falling, void **arguments) {
    Call<A...> c{kernel, arguments};
    return run(grid, threads, shared_bytes, falling, Call<A...>::go, &c);
}

}  // namespace shim

// A door for each kernel: `arguments` points at each argument, as for the driver's launch call.
// Returns nullptr, or what went wrong.
#define EXPORT(name)                                                                               \
    extern "C" const char *name##_launch(const u32 *grid, u32 threads, u32 shared_bytes,           \
                                         int falling, void **arguments) {                          \
        return shim::launch(name, grid, threads, shared_bytes, falling, arguments);                \
    }

// Everything a kernel here asks of the machine, each with two bodies: PTX on a device, plain C++ on
// a host (host_shim.h). Kernels hold no PTX of their own, so all of what they do runs in the tests.
// No header of the toolkit is needed: the run-time compiler finds all it wants in this folder.
//
// A `half2` is a u32 of two FP16 values, the lower address in the lower bits.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef TONGGUAN_HOST
#include "host_shim.h"
#else

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)
#define SHARED(name) extern __shared__ __align__(16) u8 name[]
#define EXPORT(name)

struct __align__(16) u32x4 {
    u32 x, y, z, w;
};

DEVICE u32 h2_add(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

DEVICE u32 h2_sub(u32 a, u32 b) {
    u32 d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// a * b + c, rounded once.
DEVICE u32 h2_fma(u32 a, u32 b, u32 c) {
    u32 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

DEVICE float h_to_f(u16 a) {
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a));
    return d;
}

DEVICE u16 f_to_h(float a) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(a));
    return d;
}

DEVICE float fast_exp(float a) { return __expf(a); }
DEVICE void exact_sincos(float a, float *sine, float *cosine) { sincosf(a, sine, cosine); }
DEVICE float inverse_sqrt(float a) { return rsqrtf(a); }

// Read once and never again: no place in L1, and L2 gives it up first.
DEVICE u32x4 load_stream(const u32x4 *at) {
    u32x4 d;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w)
                 : "l"(at));
    return d;
}

// What another block wrote: from L2, never from this multiprocessor's own cache.
DEVICE float load_shared_by_blocks(const float *at) {
    float d;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(d) : "l"(at) : "memory");
    return d;
}

// 16 bytes into shared memory, behind the thread's back; zeros where `wanted` is false.
DEVICE void copy_async(void *shared, const void *global, bool wanted) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(global), "r"(wanted ? 16 : 0)
                 : "memory");
}

// The same with 4 bytes.
DEVICE void copy_async_4(void *shared, const void *global, bool wanted) {
    u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(to), "l"(global), "r"(wanted ? 4 : 0)
                 : "memory");
}

DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `PENDING` of this thread's commits are under way.
template <int PENDING> DEVICE void copy_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}

// Tensor core: c[16][8] += a[16][16] * b[16][8]; fragments as PTX defines them for m16n8k16.
DEVICE void mma_16816(float c[4], const u32 a[4], const u32 b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE float lane_xor(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

#endif

DEVICE u32 h2_pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }
DEVICE u32 h2_both(u16 a) { return h2_pair(a, a); }
DEVICE float h2_low(u32 a) { return h_to_f((u16)a); }
DEVICE float h2_high(u32 a) { return h_to_f((u16)(a >> 16)); }

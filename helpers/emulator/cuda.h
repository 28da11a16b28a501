// CUDA C++ for a CPU: what nvcc knows by itself, as far as a kernel of the lectures needs it.
//
// The kernel's text follows in an unnamed namespace, so that what it calls clock or index hides
// the C library's. A function here that touches the kernel's memory itself is not instrumented: it
// reports its access to the runtime with the address of its caller.
#pragma once
#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "vectors.h"

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ __attribute__((section("cuda_constant")))
// __constinit: no flag that says whether a vector has been constructed.
#define __shared__ static __constinit __attribute__((section("cuda_shared")))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __CUDACC__
#define __CUDA_ARCH__ 900
#define UNSEEN __attribute__((noinline, no_sanitize("thread"), no_sanitize_coverage))

extern "C" {
__attribute__((const)) uint3 emulator_thread_index();
__attribute__((const)) uint3 emulator_block_index();
__attribute__((const)) uint3 emulator_block_size();
__attribute__((const)) uint3 emulator_grid_size();
__attribute__((const)) unsigned emulator_lane();
unsigned emulator_active();
long long emulator_clock();
void emulator_barrier(int line);
uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, int source, int line,
                       unsigned* ballot);
void emulator_atomic(void* address, unsigned size, uint64_t pc);
extern char emulator_dynamic_shared[];
}
#define threadIdx emulator_thread_index()
#define blockIdx emulator_block_index()
#define blockDim emulator_block_size()
#define gridDim emulator_grid_size()
constexpr int warpSize = 32;

// ---- Waiting for one another ----

// The line of the call names the barrier: a compiler may copy a call, not a line.
#define LINE int line = __builtin_LINE()

inline void __syncthreads(LINE) { emulator_barrier(line); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline unsigned __activemask() { return emulator_active(); }

inline void __syncwarp(unsigned mask = ~0u, LINE) {
    unsigned ballot;
    emulator_warp(0, mask, 0, 0, line, &ballot);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, LINE) {
    unsigned ballot;
    emulator_warp(2, mask, predicate != 0, 0, line, &ballot);
    return ballot;
}
inline int __any_sync(unsigned mask, int predicate, LINE) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, LINE) {
    return __ballot_sync(mask, !predicate, line) == 0;
}

template <class T>
UNSEEN T emulator_shuffle(unsigned mask, T value, int source, int line) {
    static_assert(sizeof(T) <= 8, "a shuffle moves 1 to 8 bytes");
    uint64_t bits = 0;
    unsigned ballot;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = emulator_warp(1, mask, bits, source, line, &ballot);
    __builtin_memcpy(static_cast<void*>(&value), &bits, sizeof value);
    return value;
}
// A lane that would read outside of its segment of `width` lanes reads its own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, LINE) {
    const int lane = emulator_lane();
    return emulator_shuffle(mask, value, (lane & -width) | (source & (width - 1)), line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, LINE) {
    const int lane = emulator_lane(), source = lane - int(delta);
    return emulator_shuffle(mask, value, source < (lane & -width) ? lane : source, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, LINE) {
    const int lane = emulator_lane(), source = lane + int(delta);
    return emulator_shuffle(mask, value, source >= (lane & -width) + width ? lane : source, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, LINE) {
    const int lane = emulator_lane(), source = lane ^ lanes;
    return emulator_shuffle(mask, value, source >= (lane & -width) + width ? lane : source, line);
}
#undef LINE

// ---- Atomics: nothing else runs between the report and the operation ----

#define ATOMIC(name, expression)                                                                \
    template <class T>                                                                          \
    UNSEEN T name(T* address, emulator::same<T> value) {                                        \
        emulator_atomic(address, sizeof(T), uint64_t(__builtin_return_address(0)));             \
        const T old = *address;                                                                 \
        *address = expression;                                                                  \
        return old;                                                                             \
    }
ATOMIC(atomicAdd, T(old + value))
ATOMIC(atomicSub, T(old - value))
ATOMIC(atomicMax, value > old ? value : old)
ATOMIC(atomicMin, value < old ? value : old)
ATOMIC(atomicExch, value)
ATOMIC(atomicAnd, T(old & value))
ATOMIC(atomicOr, T(old | value))
ATOMIC(atomicXor, T(old ^ value))
ATOMIC(atomicInc, old >= value ? T(0) : T(old + 1))
#undef ATOMIC
template <class T>
UNSEEN T atomicCAS(T* address, emulator::same<T> expected, emulator::same<T> value) {
    emulator_atomic(address, sizeof(T), uint64_t(__builtin_return_address(0)));
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

// ---- Arithmetic ----

template <class A, class B>
constexpr auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmax(T(a), T(b)));
    else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
constexpr auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmin(T(a), T(b)));
    else return T(b) < T(a) ? T(b) : T(a);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
// Approximate on a GPU; here as good as the C library.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// Never contracted into a multiply-add, on a GPU or here.
#define ROUNDED inline __attribute__((optimize("fp-contract=off"), noinline))
ROUNDED float __fadd_rn(float x, float y) { return x + y; }
ROUNDED float __fsub_rn(float x, float y) { return x - y; }
ROUNDED float __fmul_rn(float x, float y) { return x * y; }
#undef ROUNDED

template <class T>
T __ldg(const T* address) {
    return *address;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline int __mul24(int x, int y) { return x * y; }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
inline long long clock64() { return emulator_clock(); }

template <class To, class From>
To emulator_bits(From value) {
    To bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline int __float2int_ru(float x) { return int(ceilf(x)); }
inline float __int2float_rn(int x) { return float(x); }

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")
#define CUDART_PI_F 3.141592654f
#define CUDART_PI 3.1415926535897931
#define CUDART_SQRT_TWO_F 1.414213562f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f

#include "launch.h"

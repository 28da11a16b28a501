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

#define __global__ __attribute__((noipa))  // called as if from elsewhere
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
long long emulator_clock();
int emulator_barrier(int line, int value);
[[noreturn]] void emulator_trap(int line, const char* what);
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

inline void __syncthreads(LINE) { emulator_barrier(line, 0); }
inline int __syncthreads_count(int value, LINE) { return emulator_barrier(line, value != 0); }
inline int __syncthreads_or(int value, LINE) { return emulator_barrier(line, value != 0) != 0; }
inline int __syncthreads_and(int value, LINE) { return emulator_barrier(line, value == 0) == 0; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __trap(LINE) { emulator_trap(line, "__trap()"); }
#undef assert
#define assert(...) ((__VA_ARGS__) ? void() : emulator_trap(__LINE__, "assert(" #__VA_ARGS__ ")"))

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

inline unsigned emulator_reduce(int operation, unsigned mask, unsigned value, int line) {
    unsigned ballot;
    return emulator_warp(operation, mask, value, 0, line, &ballot);
}
#define REDUCE(name, operation)                                        \
    inline unsigned name(unsigned mask, unsigned value, LINE) {        \
        return emulator_reduce(operation, mask, value, line);          \
    }
REDUCE(__reduce_and_sync, 3)
REDUCE(__reduce_or_sync, 4)
REDUCE(__reduce_xor_sync, 5)
REDUCE(__reduce_add_sync, 6)
REDUCE(__reduce_min_sync, 7)
REDUCE(__reduce_max_sync, 8)
#undef REDUCE
// The sign turned, integers are ordered as unsigned ones are.
inline int __reduce_add_sync(unsigned mask, int value, LINE) {
    return emulator_reduce(6, mask, value, line);
}
inline int __reduce_min_sync(unsigned mask, int value, LINE) {
    return emulator_reduce(7, mask, value ^ 1u << 31, line) ^ 1u << 31;
}
inline int __reduce_max_sync(unsigned mask, int value, LINE) {
    return emulator_reduce(8, mask, value ^ 1u << 31, line) ^ 1u << 31;
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
ATOMIC(atomicDec, old == 0 || old > value ? value : T(old - 1))
#undef ATOMIC
template <class T>
UNSEEN T atomicCAS(T* address, emulator::same<T> expected, emulator::same<T> value) {
    emulator_atomic(address, sizeof(T), uint64_t(__builtin_return_address(0)));
    const T old = *address;
    if (old == expected) *address = value;
    return old;
}

#include "arithmetic.h"
#include "launch.h"

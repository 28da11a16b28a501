// The experiments of kernels/memory.cu on a CPU. Every function times itself with the steady clock
// and returns nanoseconds; helpers/native.py calls them through ctypes.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace {

using std::int64_t;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// A value that the compiler must have in a register here, and may know nothing about afterwards.
template <class T>
inline void opaque(T& value) {
    asm volatile("" : "+r"(value));
}

template <int CHAINS>
int64_t chase(const std::int32_t* next, std::int32_t* at, int64_t steps) {
    int64_t here[CHAINS];
    std::copy(at, at + CHAINS, here);
    int64_t start = now_ns();
    for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
        for (int chain = 0; chain < CHAINS; ++chain) here[chain] = next[here[chain]];
    }
    for (auto& place : here) opaque(place);  // the clock waits for the last loads
    int64_t ns = now_ns() - start;
    std::copy(here, here + CHAINS, at);
    return ns;
}

template <int... CHAINS>
int64_t chase_any(
    const std::int32_t* next, std::int32_t* at, int chains, int64_t steps,
    std::integer_sequence<int, CHAINS...>) {
    using Function = int64_t (*)(const std::int32_t*, std::int32_t*, int64_t);
    static constexpr Function functions[] = {chase<CHAINS + 1>...};
    return functions[chains - 1](next, at, steps);
}

// Runs work(first, last) on `threads` threads, each with its part of n. They start together when
// all are there; the time ends with the last.
template <class Work>
int64_t in_parallel(int threads, int64_t n, Work work) {
    std::atomic<int> waiting{threads};
    std::vector<int64_t> starts(threads), stops(threads);
    auto run = [&](int thread) {
        --waiting;
        while (waiting > 0) std::this_thread::yield();
        starts[thread] = now_ns();
        // Parts begin at multiples of 64 elements: no two threads write one cache line.
        int64_t part = ((n + threads - 1) / threads + 63) & ~int64_t{63};
        work(thread, std::min(n, thread * part), std::min(n, (thread + 1) * part));
        stops[thread] = now_ns();
    };
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
    run(0);
    for (auto& other : others) other.join();
    return *std::max_element(stops.begin(), stops.end()) -
           *std::min_element(starts.begin(), starts.end());
}

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef float Loaded __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
constexpr int LANES = VECTOR_BYTES / 4;
constexpr int CHAINS = 12;  // 4 or 5 cycles of latency, two multiply-adds a cycle: 8 to 10 needed

// Several sums at once, so that no addition waits for the one before.
float sum_packed(const float* x, int64_t n) {
    Vector sums[8] = {};
    int64_t i = 0;
    for (; i + 8 * LANES <= n; i += 8 * LANES) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sums[k] += *(const Loaded*)(x + i + k * LANES);
    }
    float total = 0;
    for (; i < n; ++i) total += x[i];
    for (auto& sum : sums) {
        for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
    }
    return total;
}

float sum_strided(const float* x, int64_t n, int64_t stride) {
    float sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sums[k] += x[(i + k) * stride];
    }
    for (; i < n; ++i) sums[0] += x[i * stride];
    float total = 0;
    for (float sum : sums) total += sum;
    return total;
}

}  // namespace

extern "C" {

// Follows `chains` (1 to 16) chains through next, one step of each in turn; at: where each stands.
int64_t cpu_chase(const std::int32_t* next, std::int32_t* at, int chains, int64_t steps) {
    return chase_any(next, at, chains, steps, std::make_integer_sequence<int, 16>{});
}

// Additions that wait for each other: one cycle each. From a register: of constants, the newest
// CPUs add several at once.
int64_t cpu_add_chain(int64_t steps, int64_t* value) {
    int64_t v = *value, one = 1;
    opaque(one);
    int64_t start = now_ns();
    for (int64_t i = 0; i < steps; i += 32) {
#pragma GCC unroll 32
        for (int k = 0; k < 32; ++k) {
            v += one;
            opaque(v);
        }
    }
    int64_t ns = now_ns() - start;
    *value = v;
    return ns;
}

// v = a v + b, `steps` times one after the other.
int64_t cpu_fma_chain(int64_t steps, float a, float b, float* value) {
    float v = *value;
    int64_t start = now_ns();
    for (int64_t i = 0; i < steps; ++i) v = a * v + b;
    volatile float done = v;
    int64_t ns = now_ns() - start;
    *value = done;
    return ns;
}

// How many of them a thread of cpu_fma_all computes in one step.
int cpu_fma_width() { return CHAINS * LANES; }

// The same with all that the CPU has: vectors, independent chains, threads. values: threads x
// cpu_fma_width() floats.
int64_t cpu_fma_all(int threads, int64_t steps, float a, float b, float* values) {
    return in_parallel(threads, threads, [=](int thread, int64_t, int64_t) {
        float* mine = values + thread * CHAINS * LANES;
        Vector v[CHAINS];
        for (int c = 0; c < CHAINS; ++c) v[c] = *(Loaded*)(mine + c * LANES);
        for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
            for (int c = 0; c < CHAINS; ++c) v[c] = a * v[c] + b;
        }
        for (int c = 0; c < CHAINS; ++c) *(Loaded*)(mine + c * LANES) = v[c];
    });
}

// Sums x[stride * i] for i < n; sums: one a thread.
int64_t cpu_read(const float* x, int64_t n, int64_t stride, int threads, float* sums) {
    return in_parallel(threads, n, [=](int thread, int64_t first, int64_t last) {
        const float* mine = x + first * stride;
        sums[thread] = stride == 1 ? sum_packed(mine, last - first)
                                   : sum_strided(mine, last - first, stride);
    });
}

int64_t cpu_copy(const float* __restrict__ x, float* __restrict__ y, int64_t n, int threads) {
    return in_parallel(threads, n, [=](int, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) y[i] = x[i];
    });
}

// y = x + scale * z
int64_t cpu_triad(
    const float* __restrict__ x, const float* __restrict__ z, float* __restrict__ y, float scale,
    int64_t n, int threads) {
    return in_parallel(threads, n, [=](int, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) y[i] = x[i] + scale * z[i];
    });
}
}

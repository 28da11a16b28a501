// What memory costs: one access that waits for the one before, many at once, and wide steps.
//   chase            one thread follows a chain of indices through global memory
//   chase_addresses  the same along a chain of addresses, as in a linked list
//   chase_shared     a chain through shared memory, of indices or (SHARED_STEP 4) of offsets
//   chain_fma        multiply-adds that wait for each other, by any number of threads
//   read_strided     one float in every `stride`
//   read_in_flight   LOADS loads of a VECTOR (float, float2, float4) under way in every thread

#ifndef VECTOR
#define VECTOR float
#endif
#ifndef LOADS
#define LOADS 1
#endif
#ifndef SHARED_STEP
#define SHARED_STEP 1
#endif
#ifdef __CUDACC_RTC__
// What tells the compiler to load from global memory (LDG), not from wherever it may be (LD).
#define IN_GLOBAL_MEMORY(pointer) __builtin_assume(__isGlobal(pointer))
#else
#define IN_GLOBAL_MEMORY(pointer)
#endif

// Every load's address is the value that the load before brought: a step costs one latency, and
// one instruction that makes an address of an index. The walk starts at next[*at] and leaves in
// *at where it ended; the first `warmup` steps bring the chain into the caches, and the next
// `steps` are timed.
extern "C" __global__ void chase(
    const int* next, int* at, long long warmup, long long steps, long long* cycles) {
    int here = *at;
    for (long long i = 0; i < warmup; ++i) here = next[here];
    long long start = clock64();
#pragma unroll 16
    for (long long i = 0; i < steps; ++i) here = next[here];
    *cycles = clock64() - start;
    *at = here;
}

// As `chase`, but what a load brings is the next one's address, with nothing to compute. *at is an
// offset in bytes from `next`. The first `relative` elements of `next` are such offsets too, and
// are made addresses for the walk; the caller who knows where `next` lies passes addresses, and 0.
extern "C" __global__ void chase_addresses(
    long long* next, long long* at, long long relative, long long warmup, long long steps,
    long long* cycles) {
    for (long long i = 0; i < relative; ++i) next[i] += (long long)next;
    const long long* here = next + *at / 8;
    for (long long i = 0; i < warmup; ++i) here = (const long long*)*here;
    long long start = clock64();
#pragma unroll 16
    for (long long i = 0; i < steps; ++i) {
        IN_GLOBAL_MEMORY(here);
        here = (const long long*)*here;
    }
    *cycles = clock64() - start;
    *at = 8 * (here - next);
    for (long long i = 0; i < relative; ++i) next[i] -= (long long)next;
}

// As `chase`, of a chain of n <= 4096 indices; one block, of which every thread copies and one
// walks. With a SHARED_STEP of 4 the copy holds offsets in bytes, which are addresses within shared
// memory: a load needs nothing else.
extern "C" __global__ void chase_shared(
    const int* next, int n, int* at, long long steps, long long* cycles) {
    __shared__ int chain[4096];
    for (int i = threadIdx.x; i < n; i += blockDim.x) chain[i] = SHARED_STEP * next[i];
    __syncthreads();
    if (threadIdx.x != 0) return;
    const char* bytes = (const char*)chain;
    int here = SHARED_STEP * *at;
    long long start = clock64();
#pragma unroll 16
    for (long long i = 0; i < steps; ++i) here = *(const int*)(bytes + 4 / SHARED_STEP * here);
    *cycles = clock64() - start;
    *at = here / SHARED_STEP;
}

// v = a v + a, `steps` times, from v = y[i] on in thread i. One thread alone shows how long a
// multiply-add takes; a full GPU shows how many it finishes meanwhile. a serves twice: an H200
// read three different registers at half of the rate (they lie in two banks). cycles: thread 0's.
extern "C" __global__ void chain_fma(float* y, float a, int steps, long long* cycles) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    float v = y[i];
    long long start = clock64();
#pragma unroll 128
    for (int step = 0; step < steps; ++step) v = fmaf(a, v, a);
    long long stop = clock64();
    y[i] = v;
    if (i == 0) *cycles = stop - start;
}

// Sums x[offset + stride * i] for i < n, `rounds` times. y: one partial sum a thread, so that next
// to nothing is written. Adjacent lanes take adjacent i. Four loads are under way at once in each
// thread. In each round a block reads what a distant one read before: its SM's L1 does not have it.
extern "C" __global__ void read_strided(
    const float* x, float* y, long long n, int stride, int offset, int rounds) {
    long long threads = gridDim.x * (long long)blockDim.x;
    const float* first = x + offset;
    float total = 0.0f;
    unsigned block = blockIdx.x;
    for (int round = 0; round < rounds; ++round) {
#pragma unroll 4
        for (long long i = block * (long long)blockDim.x + threadIdx.x; i < n; i += threads) {
            total += first[stride * i];
        }
        block = (block + 37) % gridDim.x;
    }
    y[blockIdx.x * (long long)blockDim.x + threadIdx.x] = total;
}

__device__ float sum(float v) { return v; }
__device__ float sum(float2 v) { return v.x + v.y; }
__device__ float sum(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Sums x, n vectors long; y: one partial sum a thread. A thread asks for LOADS vectors, waits for
// all of them, and asks for the next: of a warp, 32 * LOADS * sizeof(VECTOR) bytes are on their
// way at any time.
extern "C" __global__ void read_in_flight(const VECTOR* x, float* y, long long n) {
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    long long threads = gridDim.x * (long long)blockDim.x;
    float total = 0.0f;
    long long i = thread;
#pragma unroll 1
    for (; i + (LOADS - 1) * threads < n; i += LOADS * threads) {
        VECTOR v[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) v[k] = x[i + k * threads];
#pragma unroll
        for (int k = 0; k < LOADS; ++k) total += sum(v[k]);
    }
#pragma unroll 1
    for (; i < n; i += threads) total += sum(x[i]);
    y[thread] = total;
}

// Who runs on which SM, and when; and what blocks can see of each other.

// The SM's number and a clock that all SMs share are special registers. CUDA C++ has no functions
// for them, hence two lines of assembly. The emulator has no SMs, and its clock only counts calls.
__device__ int sm_number() {
#ifdef __CUDACC_RTC__
    int sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
#else
    return -1;
#endif
}
__device__ long long now_ns() {
#ifdef __CUDACC_RTC__
    long long ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
#else
    return clock64();
#endif
}

// who: (threads, 3), each thread's block, its number in the block, and the number of the thread in
// lane 0 of its warp, which it has from that thread. sm: (threads,). times: (threads, 2), start and
// end in ns. Block b passes the time for cycles[b] cycles of its SM.
extern "C" __global__ void record_schedule(int* who, int* sm, long long* times, const int* cycles) {
    long long started_ns = now_ns();
    long long start = clock64();
    while (clock64() - start < cycles[blockIdx.x]) {
    }
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    who[3 * i + 0] = blockIdx.x;
    who[3 * i + 1] = threadIdx.x;
    who[3 * i + 2] = __shfl_sync(0xffffffff, (int)threadIdx.x, 0);
    sm[i] = sm_number();
    times[2 * i + 0] = started_ns;
    times[2 * i + 1] = now_ns();
}

// All threads add 1 to a counter in shared memory, and each block notes what it then finds there.
extern "C" __global__ void count_in_shared(int* found) {
    __shared__ int counter;
    if (threadIdx.x == 0) counter = 0;
    __syncthreads();
    atomicAdd(&counter, 1);
    __syncthreads();
    if (threadIdx.x == 0) found[blockIdx.x] = atomicAdd(&counter, 0);
}

// The same with a counter in global memory, which the host has set to 0.
extern "C" __global__ void count_in_global(int* found, int* counter) {
    atomicAdd(counter, 1);
    __syncthreads();
    if (threadIdx.x == 0) found[blockIdx.x] = atomicAdd(counter, 0);
}

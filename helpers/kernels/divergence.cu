// What branches cost: a warp issues one instruction at a time, for those of its 32 threads that are
// at that place of the program.

// Each thread takes one of `ways` branches, all equally long; neighbours change branch every `span`
// threads: 1 mixes all branches in each warp, 32 gives every warp one of its own.
#define BRANCH(k)                                                                       \
    case k:                                                                             \
        for (int s = 0; s < steps; ++s) v = fmaf(v, 0.5f + 0.01f * k, 1.0f + 0.1f * k); \
        break;
extern "C" __global__ void branches(float* y, int ways, int span, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = 0.0f;
    switch (i / span % ways) {
        BRANCH(0) BRANCH(1) BRANCH(2) BRANCH(3) BRANCH(4) BRANCH(5) BRANCH(6) BRANCH(7)
        BRANCH(8) BRANCH(9) BRANCH(10) BRANCH(11) BRANCH(12) BRANCH(13) BRANCH(14) BRANCH(15)
        BRANCH(16) BRANCH(17) BRANCH(18) BRANCH(19) BRANCH(20) BRANCH(21) BRANCH(22) BRANCH(23)
        BRANCH(24) BRANCH(25) BRANCH(26) BRANCH(27) BRANCH(28) BRANCH(29) BRANCH(30) BRANCH(31)
    }
    y[i] = v;
}

// The slide's example: the first `split` threads of a warp do A and B, the others X and Y, and then
// all do Z. start, end: (5, 32), the SM's clock around each of the steps A, B, X, Y, Z.
#define STEP(k)                                                  \
    start[32 * k + lane] = clock64();                            \
    for (int s = 0; s < steps; ++s) v = fmaf(v, 0.5f, 1.0f + k); \
    end[32 * k + lane] = clock64();
extern "C" __global__ void slide(long long* start, long long* end, float* y, int split, int steps) {
    int lane = threadIdx.x;
    float v = lane;
    if (lane < split) {
        STEP(0)
        STEP(1)
    } else {
        STEP(2)
        STEP(3)
    }
    STEP(4)
    y[lane] = v;
}

// A branch so short that the compiler needs none: a predicate switches its instruction off.
extern "C" __global__ void short_branch(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    if (v < 0.0f) v = 0.1f * v;
    y[i] = v;
}

// A longer one: some lanes loop, the others wait for them before all go on.
extern "C" __global__ void long_branch(const float* x, float* y, int n, int steps) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    if (v < 0.0f) {
#pragma unroll 1
        for (int s = 0; s < steps; ++s) v = v * v + 0.1f;
    }
    y[i] = v;
}

// Lane 0 waits for lane 1, and lane 1 then for lane 0: both are answered only where the lanes of a
// warp can take turns, whichever side of the branch is run first.
extern "C" __global__ void handshake(int* flag, int* answered, int patience) {
    int tries = 0;
    if (threadIdx.x == 0) {
        while (atomicAdd(flag, 0) != 1 && tries < patience) ++tries;
        atomicExch(flag, 2);
    } else {
        atomicExch(flag, 1);
        while (atomicAdd(flag, 0) != 2 && tries < patience) ++tries;
    }
    answered[threadIdx.x] = tries < patience;
}

// C = A B in ordinary arithmetic (no tensor cores), from the first thing one writes to tiles in
// registers. A is m x k, B is k x n, C is m x n, row-major; element (i, j) of A is a[i * lda + j],
// so lda, the leading dimension, is the distance between two rows, in elements (at least k).
//   matmul_rows       a thread an element of C; a warp's lanes are neighbours down a column
//   matmul_columns    the same; a warp's lanes are neighbours along a row
//   matmul_shared     a block loads tiles of A and B once, for all its threads
//   matmul_registers  a thread takes TM x TN elements: what is loaded from shared memory counts too
// `scalar` is float, __half or __nv_bfloat16; sums are in fp32 and rounded once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// One element of C: a row of A times a column of B.
__device__ float dot(const scalar* row, const scalar* column, int k, long long ldb) {
    float sum = 0.0f;
    for (int p = 0; p < k; ++p) sum += float(row[p]) * float(column[p * ldb]);
    return sum;
}

// A warp reads 32 rows of A, each in a line of its own, and one element of B.
extern "C" __global__ void matmul_rows(const scalar* a, const scalar* b, scalar* c, int m, int n,
                                       int k, long long lda, long long ldb, long long ldc) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int row = x, column = y;
    if (row >= m || column >= n) return;
    c[row * ldc + column] = scalar(dot(a + row * lda, b + column, k, ldb));
}

// A warp reads one element of A, and 32 neighbours of B: one line.
extern "C" __global__ void matmul_columns(const scalar* a, const scalar* b, scalar* c, int m, int n,
                                          int k, long long lda, long long ldb, long long ldc) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int row = y, column = x;
    if (row >= m || column >= n) return;
    c[row * ldc + column] = scalar(dot(a + row * lda, b + column, k, ldb));
}

#ifndef TILE
#define TILE 16
#endif

// Blocks of TILE x TILE threads. Each element is read from global memory once a block, not once a
// thread: k / TILE phases, each of which loads two tiles and multiplies them.
extern "C" __global__ void matmul_shared(const scalar* a, const scalar* b, scalar* c, int m, int n,
                                         int k, long long lda, long long ldb, long long ldc) {
    __shared__ float tile_a[TILE][TILE], tile_b[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (int k0 = 0; k0 < k; k0 += TILE) {
        // Behind the edges there are zeros. No thread may leave early: each loads for the others.
        tile_a[y][x] = row < m && k0 + x < k ? float(a[row * lda + k0 + x]) : 0.0f;
        tile_b[y][x] = k0 + y < k && column < n ? float(b[(k0 + y) * ldb + column]) : 0.0f;
        __syncthreads();  // all has been written before anyone reads
        for (int p = 0; p < TILE; ++p) sum += tile_a[y][p] * tile_b[p][x];
        __syncthreads();  // all has been read before anyone writes the next tiles
    }
    if (row < m && column < n) c[row * ldc + column] = scalar(sum);
}

// ---- Tiles in registers ----
// A block computes BM x BN elements of C, BK of the inner dimension at a time; a thread TM x TN.
// The lanes of a warp lie LANES_M x 32 / LANES_M over its part of the tile.
#ifndef BM
#define BM 128
#endif
#ifndef BN
#define BN 128
#endif
#ifndef BK
#define BK 8
#endif
#ifndef TM
#define TM 8
#endif
#ifndef TN
#define TN 16
#endif
#ifndef LANES_M
#define LANES_M 8
#endif
#ifndef GROUP  // rows of tiles that blocks with neighbouring numbers share
#define GROUP 8
#endif
#ifndef BLOCKS_PER_SM  // that the compiler must leave registers for
#define BLOCKS_PER_SM 2
#endif
#ifndef ALIGNED  // 1: n, k, lda, ldb, ldc are multiples of 4, and the addresses of 4 elements
#define ALIGNED 1
#endif

const int lanes_n = 32 / LANES_M, warp_m = LANES_M * TM, warp_n = lanes_n * TN;
const int threads = BM / TM * (BN / TN);
const int loads_a = BM * BK / (4 * threads), loads_b = BK * BN / (4 * threads);  // by a thread
static_assert(TM % 4 == 0 && TN % 4 == 0 && BM % warp_m == 0 && BN % warp_n == 0, "warps fit");
static_assert(BM * BK % (4 * threads) == 0 && BK * BN % (4 * threads) == 0, "all threads load");
static_assert(BK % 8 == 0, "A is read by 8 elements of a row");

struct __align__(4 * sizeof(scalar)) Four {
    scalar elements[4];
};

// Four elements of a row, of which `left` are there, and zeros for the others.
__device__ float4 load_four(const scalar* from, int left) {
    float v[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#if ALIGNED
    if (left > 0) {
        Four four = *reinterpret_cast<const Four*>(from);
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = float(four.elements[e]);
    }
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (e < left) v[e] = float(from[e]);
    }
#endif
    return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ void store_four(scalar* to, int left, const float* v) {
#if ALIGNED
    Four four;
#pragma unroll
    for (int e = 0; e < 4; ++e) four.elements[e] = scalar(v[e]);
    if (left > 0) *reinterpret_cast<Four*>(to) = four;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (e < left) to[e] = scalar(v[e]);
    }
#endif
}

extern "C" __global__ void __launch_bounds__(threads, BLOCKS_PER_SM)
    matmul_registers(const scalar* a, const scalar* b, scalar* c, int m, int n, int k,
                     long long lda, long long ldb, long long ldc) {
    // A's tile lies turned, so that what a thread multiplies in one step are neighbours: it reads
    // them as float4. Two of each: one is filled while the other is multiplied.
    __shared__ __align__(16) float tile_a[2][BK][BM + 4], tile_b[2][BK][BN];

    // Blocks that run at the same time take a patch of C with GROUP rows of tiles, not one long
    // row of tiles: they share more of A and B, and find it in L2.
    int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
    int first = blockIdx.x / (GROUP * tiles_n) * GROUP, high = min(GROUP, tiles_m - first);
    int in_group = blockIdx.x % (GROUP * tiles_n);
    int row0 = (first + in_group % high) * BM, column0 = in_group / high * BN;

    // Load g of a tile takes four neighbours: of A at (a_row, a_p), of B at (b_p, b_column). A warp
    // takes 8 elements of 16 rows of A: whole sectors and, turned and with 4 columns of padding, 32
    // banks. Rows behind the last one repeat it: what they give is not stored.
    auto a_row = [](unsigned g) { return int(g / 2 % BM); };
    auto a_p = [](unsigned g) { return int(g / (2 * BM) * 8 + g % 2 * 4); };
    auto b_p = [](unsigned g) { return int(g / (BN / 4)); };
    auto b_column = [](unsigned g) { return int(g % (BN / 4) * 4); };

    const unsigned t = threadIdx.x;
    const scalar *from_a[loads_a], *from_b[loads_b];
#pragma unroll
    for (int i = 0, g = t; i < loads_a; ++i, g += threads)
        from_a[i] = a + min(row0 + a_row(g), m - 1) * lda + a_p(g);
#pragma unroll
    for (int i = 0, g = t; i < loads_b; ++i, g += threads)
        from_b[i] = b + b_p(g) * ldb + column0 + b_column(g);

    float4 next_a[loads_a], next_b[loads_b];
    auto load = [&](int k_left) {
#pragma unroll
        for (int i = 0, g = t; i < loads_a; ++i, g += threads) {
            next_a[i] = load_four(from_a[i], k_left - a_p(g));
            from_a[i] += BK;
        }
#pragma unroll
        for (int i = 0, g = t; i < loads_b; ++i, g += threads) {
            next_b[i] = load_four(from_b[i], b_p(g) < k_left ? n - column0 - b_column(g) : 0);
            from_b[i] += BK * ldb;
        }
    };
    auto store = [&](int buffer) {
#pragma unroll
        for (int i = 0, g = t; i < loads_a; ++i, g += threads) {
            tile_a[buffer][a_p(g)][a_row(g)] = next_a[i].x;
            tile_a[buffer][a_p(g) + 1][a_row(g)] = next_a[i].y;
            tile_a[buffer][a_p(g) + 2][a_row(g)] = next_a[i].z;
            tile_a[buffer][a_p(g) + 3][a_row(g)] = next_a[i].w;
        }
#pragma unroll
        for (int i = 0, g = t; i < loads_b; ++i, g += threads)
            *reinterpret_cast<float4*>(&tile_b[buffer][b_p(g)][b_column(g)]) = next_b[i];
    };

    // A thread's elements are patches of 4 x 4, as far apart as the patches of all lanes are wide:
    // the lanes then read neighbouring float4, which is free of bank conflicts.
    unsigned warp = t / 32, lane = t % 32;
    int thread_row = warp / (BN / warp_n) * warp_m + lane / lanes_n * 4;
    int thread_column = warp % (BN / warp_n) * warp_n + lane % lanes_n * 4;
    float sum[TM][TN] = {};

    // Needed again at the end only: until then it would take registers, and some would spill.
    __shared__ int corner[2];
    if (t == 0) corner[0] = row0, corner[1] = column0;

    load(k);
    store(0);
    __syncthreads();
    int buffer = 0;
    for (int k_left = k - BK; k_left > -BK; k_left -= BK) {
        // Under way during the arithmetic, which does not need it. Behind the last tile it gives
        // zeros: under an `if`, the compiler would move it down to store(), which does need it.
        load(k_left);
#pragma unroll
        for (int p = 0; p < BK; ++p) {
            float x[TM], y[TN];
#pragma unroll
            for (int i = 0; i < TM; i += 4) {
                const float* from = &tile_a[buffer][p][thread_row + i * LANES_M];
                *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(from);
            }
#pragma unroll
            for (int j = 0; j < TN; j += 4) {
                const float* from = &tile_b[buffer][p][thread_column + j * lanes_n];
                *reinterpret_cast<float4*>(y + j) = *reinterpret_cast<const float4*>(from);
            }
#pragma unroll
            for (int i = 0; i < TM; ++i) {
#pragma unroll
                for (int j = 0; j < TN; ++j) sum[i][j] += x[i] * y[j];
            }
        }
        buffer ^= 1;
        store(buffer);  // which all have read: they have been past a barrier since
        __syncthreads();
    }
    row0 = corner[0] + thread_row, column0 = corner[1] + thread_column;
#pragma unroll
    for (int i = 0; i < TM; ++i) {
        int row = row0 + i / 4 * 4 * LANES_M + i % 4;
#pragma unroll
        for (int j = 0; j < TN; j += 4) {
            int column = column0 + j * lanes_n;
            if (row < m) store_four(c + row * ldc + column, n - column, &sum[i][j]);
        }
    }
}

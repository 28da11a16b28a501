// y = x.T for floats: x has `rows` rows and `columns` columns, y the other way round; both without
// gaps, rows up to 2^21 - 32, columns up to 2^31 - 32. Blocks of 32 x 8 threads, a grid of
// ceil(columns / 32) x ceil(rows / 32): one block a tile of 32 x 32, four elements a thread.
//   transpose_naive      reads rows and writes columns: 32 lanes write to 32 sectors
//   transpose_tiled      turns the tile in shared memory: both sides are rows, 4 sectors each
//   transpose_swizzled   the same with the tile's columns permuted instead of padded
// PAD, a macro, is the number of columns that the tile in shared memory has beyond its 32. Without
// one, the 32 floats of its column lie in one bank.

#ifndef PAD
#define PAD 1
#endif

constexpr int TILE = 32;
constexpr int STEP = 8;  // the rows that a block copies at once: blockDim.y

extern "C" __global__ void transpose_naive(const float* x, float* y, int rows, int columns) {
    int column = blockIdx.x * TILE + threadIdx.x;
    for (int k = 0; k < TILE; k += STEP) {
        int row = blockIdx.y * TILE + threadIdx.y + k;
        if (row < rows && column < columns) {
            y[(long long)column * rows + row] = x[(long long)row * columns + column];
        }
    }
}

extern "C" __global__ void transpose_tiled(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[TILE][TILE + PAD];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;  // where the tile begins in x

    for (int k = threadIdx.y; k < TILE; k += STEP) {
        if (row + k < rows && column + threadIdx.x < columns) {
            tile[k][threadIdx.x] = x[(long long)(row + k) * columns + column + threadIdx.x];
        }
    }
    __syncthreads();  // a thread writes what others have read
    for (int k = threadIdx.y; k < TILE; k += STEP) {
        if (column + k < columns && row + threadIdx.x < rows) {
            y[(long long)(column + k) * rows + row + threadIdx.x] = tile[threadIdx.x][k];
        }
    }
}

// Row r keeps its column c at place c ^ r. For one r, or for one c, the 32 places all differ: a row
// and a column are both spread over all banks.
extern "C" __global__ void transpose_swizzled(const float* x, float* y, int rows, int columns) {
    __shared__ float tile[TILE][TILE];
    int row = blockIdx.y * TILE, column = blockIdx.x * TILE;

    for (int k = threadIdx.y; k < TILE; k += STEP) {
        if (row + k < rows && column + threadIdx.x < columns) {
            tile[k][threadIdx.x ^ k] = x[(long long)(row + k) * columns + column + threadIdx.x];
        }
    }
    __syncthreads();
    for (int k = threadIdx.y; k < TILE; k += STEP) {
        if (column + k < columns && row + threadIdx.x < rows) {
            float turned = tile[threadIdx.x][k ^ threadIdx.x];
            y[(long long)(column + k) * rows + row + threadIdx.x] = turned;
        }
    }
}

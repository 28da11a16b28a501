// Who runs where. One thread for each element of a matrix, in a two-dimensional grid.

// who: (rows, columns, 4). Each thread leaves its block's x and y, its own place in the block, and
// its warp at the element that it is responsible for.
extern "C" __global__ void who_am_i(int* who, int rows, int columns) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= rows || column >= columns) return;
    int place = threadIdx.y * blockDim.x + threadIdx.x;  // threads are numbered x first
    int* mine = who + 4 * (row * columns + column);
    mine[0] = blockIdx.x;
    mine[1] = blockIdx.y;
    mine[2] = place;
    mine[3] = place / warpSize;
}

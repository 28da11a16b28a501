// GeLU in its tanh form, memory-bound as it should be. `scalar` is float, __half or __nv_bfloat16;
// the arithmetic is in fp32. `vector_bytes`: what one thread reads at once, 16 where x is aligned.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// 0.5 x (1 + tanh(a)) = x / (1 + exp(-2a)): one fast exponential and one fast division. The absolute
// error is fp32's rounding; the relative one grows only where GeLU is almost 0. For large |x| the
// exponential is 0 or infinite and the quotient x or 0: nothing overflows into NaN.
__device__ float gelu(float x) {
    float a = 0.79788456f * (x + 0.044715f * x * x * x);
    return __fdividef(x, 1.0f + __expf(-2.0f * a));
}

const int width = vector_bytes / sizeof(scalar);

struct __align__(vector_bytes) Vector {
    scalar elements[width];
};

extern "C" __global__ void gelu_kernel(const scalar* x, scalar* y, long long n) {
    long long i = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * width;
    if (i + width <= n) {
        Vector v = *reinterpret_cast<const Vector*>(x + i);
#pragma unroll
        for (int k = 0; k < width; ++k) v.elements[k] = scalar(gelu(float(v.elements[k])));
        *reinterpret_cast<Vector*>(y + i) = v;
    } else {
        for (; i < n; ++i) y[i] = scalar(gelu(float(x[i])));
    }
}

// GeLU of n floats (n up to 2^30): from the first thing one writes to the memory's own speed.
//   gelu_naive    one thread an element; its literals are doubles, and so is most of its work
//   gelu_float    the same in fp32
//   gelu_float4   four elements a thread, 16 bytes in one access
//   gelu_four     four elements a thread, in four accesses of 4 bytes: what float4 is compared with
// FORM, a macro, is how an element is computed: exact, fast, logistic, or nothing (a plain copy).

__device__ float inner(float x) { return 0.79788456f * (x + 0.044715f * x * x * x); }

// tanhf is right to a few units in the last place: a polynomial for small |x|, else an exponential.
__device__ float exact(float x) { return 0.5f * x * (1.0f + tanhf(inner(x))); }

// __tanhf is one instruction of the special function unit; NVIDIA promises a relative error of
// 2^-10.987, and an H200 was seen to have 1.1e-5.
__device__ float fast(float x) { return 0.5f * x * (1.0f + __tanhf(inner(x))); }

// (1 + tanh(a)) / 2 = 1 / (1 + exp(-2a)): one fast exponential and one fast division.
__device__ float logistic(float x) { return __fdividef(x, 1.0f + __expf(-2.0f * inner(x))); }

__device__ float nothing(float x) { return x; }

#ifndef FORM
#define FORM exact
#endif

// One thread computes one element, and finds out from its place which one.
extern "C" __global__ void gelu_naive(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {  // the last block may reach past the end
        y[i] = 0.5 * x[i] * (1.0 + tanh(0.79788456 * (x[i] + 0.044715 * x[i] * x[i] * x[i])));
    }
}

extern "C" __global__ void gelu_float(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = FORM(x[i]);
}

// x and y must begin at multiples of 16 bytes.
extern "C" __global__ void gelu_float4(const float* x, float* y, int n) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 < n) {
        float4 v = *reinterpret_cast<const float4*>(x + i);
        v = make_float4(FORM(v.x), FORM(v.y), FORM(v.z), FORM(v.w));
        *reinterpret_cast<float4*>(y + i) = v;
    } else {
        for (; i < n; ++i) y[i] = FORM(x[i]);
    }
}

// All four loads are under way before the first result is needed.
extern "C" __global__ void gelu_four(const float* x, float* y, int n) {
    int first = 4 * blockIdx.x * blockDim.x + threadIdx.x;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        int i = first + k * blockDim.x;  // neighbours stay neighbours: one step is one block wide
        v[k] = i < n ? x[i] : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        int i = first + k * blockDim.x;
        if (i < n) y[i] = FORM(v[k]);
    }
}

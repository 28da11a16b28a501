// __half and __nv_bfloat16: computed in float, rounded to nearest even after each operation.
#pragma once
#include <string.h>

namespace emulator {
inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// Each format: 16 bits <-> float.
struct Half {
    static float widen(uint16_t h) {
        const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fff;
        if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
        if (rest >= 0x0400) return float_of(sign | ((rest << 13) + (112u << 23)));
        return float_of(sign | bits_of(float(rest) * 0x1p-24f));  // subnormal
    }
    static uint16_t round(float x) {
        const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000) return 0x7fff;         // NaN, as CUDA writes it
        if (rest >= 0x477ff000) return sign | 0x7c00;  // from 65520 on: infinity
        // Below 2^-14: the last bit of 0.5 + x is worth 2^-24, as a subnormal's is.
        if (rest < 0x38800000) return sign | (bits_of(float_of(rest) + 0.5f) - bits_of(0.5f));
        return sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
    }
};
struct Bfloat16 {
    static float widen(uint16_t h) { return float_of(uint32_t(h) << 16); }
    static uint16_t round(float x) {
        const uint32_t bits = bits_of(x);
        if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

// To float so that rounding again, to fewer bits, gives what rounding once would: an inexact
// result gets an odd last bit ("round to odd").
inline float to_odd(double x) {
    const float near = float(x);
    if (near == x || x != x) return near;
    const uint32_t bits = bits_of(near);
    return float_of((fabs(double(near)) > fabs(x) ? bits - 1 : bits) | 1);
}

template <class Format>
struct Narrow {
    uint16_t bits;
    Narrow() = default;
    Narrow(float x) : bits(Format::round(x)) {}
    Narrow(double x) : bits(Format::round(to_odd(x))) {}
    Narrow(int x) : Narrow(double(x)) {}
    Narrow(unsigned x) : Narrow(double(x)) {}
    operator float() const { return Format::widen(bits); }
    float wide() const { return Format::widen(bits); }
    friend Narrow operator+(Narrow a, Narrow b) { return a.wide() + b.wide(); }
    friend Narrow operator-(Narrow a, Narrow b) { return a.wide() - b.wide(); }
    friend Narrow operator*(Narrow a, Narrow b) { return a.wide() * b.wide(); }
    friend Narrow operator/(Narrow a, Narrow b) { return a.wide() / b.wide(); }
    friend Narrow operator-(Narrow a) { return -a.wide(); }
    friend bool operator<(Narrow a, Narrow b) { return a.wide() < b.wide(); }
    friend bool operator>(Narrow a, Narrow b) { return a.wide() > b.wide(); }
    friend bool operator<=(Narrow a, Narrow b) { return a.wide() <= b.wide(); }
    friend bool operator>=(Narrow a, Narrow b) { return a.wide() >= b.wide(); }
    friend bool operator==(Narrow a, Narrow b) { return a.wide() == b.wide(); }
    friend bool operator!=(Narrow a, Narrow b) { return a.wide() != b.wide(); }
    Narrow& operator+=(Narrow b) { return *this = *this + b; }
    Narrow& operator-=(Narrow b) { return *this = *this - b; }
    Narrow& operator*=(Narrow b) { return *this = *this * b; }
    Narrow& operator/=(Narrow b) { return *this = *this / b; }
};

template <class Format>
struct alignas(4) Narrow2 {
    Narrow<Format> x, y;
    MOVES_WHOLE(Narrow2)
    Narrow2(Narrow<Format> x, Narrow<Format> y) : x(x), y(y) {}
    friend Narrow2 operator+(Narrow2 a, Narrow2 b) { return {a.x + b.x, a.y + b.y}; }
    friend Narrow2 operator-(Narrow2 a, Narrow2 b) { return {a.x - b.x, a.y - b.y}; }
    friend Narrow2 operator*(Narrow2 a, Narrow2 b) { return {a.x * b.x, a.y * b.y}; }
    friend Narrow2 operator/(Narrow2 a, Narrow2 b) { return {a.x / b.x, a.y / b.y}; }
    Narrow2& operator+=(Narrow2 b) { return *this = *this + b; }
    Narrow2& operator-=(Narrow2 b) { return *this = *this - b; }
    Narrow2& operator*=(Narrow2 b) { return *this = *this * b; }
    Narrow2& operator/=(Narrow2 b) { return *this = *this / b; }
};
}  // namespace emulator

using __half = emulator::Narrow<emulator::Half>;
using __half2 = emulator::Narrow2<emulator::Half>;
using __nv_bfloat16 = emulator::Narrow<emulator::Bfloat16>;
using __nv_bfloat162 = emulator::Narrow2<emulator::Bfloat16>;
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// The names that carry the format.
#define CONVERSIONS(T, T2, half, half2)                                                    \
    inline float __##half##2float(T x) { return x.wide(); }                                \
    inline T __float2##half(float x) { return x; }                                         \
    inline T __float2##half##_rn(float x) { return x; }                                    \
    inline T __double2##half(double x) { return x; }                                       \
    inline T __int2##half##_rn(int x) { return x; }                                        \
    inline int __##half##2int_rz(T x) { return emulator::to_integer<int>(x.wide()); }      \
    inline int __##half##2int_rn(T x) { return emulator::to_integer<int>(rintf(x.wide())); } \
    inline T2 __##half##2##half2(T x) { return {x, x}; }                                   \
    inline T2 __halves2##half2(T x, T y) { return {x, y}; }                                \
    inline T2 __floats2##half2##_rn(float x, float y) { return {x, y}; }                   \
    inline T2 __float2##half2##_rn(float x) { return {x, x}; }                             \
    inline T2 __float22##half2##_rn(float2 v) { return {v.x, v.y}; }                       \
    inline T __low2##half(T2 v) { return v.x; }                                            \
    inline T __high2##half(T2 v) { return v.y; }
CONVERSIONS(__half, __half2, half, half2)
CONVERSIONS(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162)
#undef CONVERSIONS
inline float2 __half22float2(__half2 v) { return {v.x.wide(), v.y.wide()}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x.wide(), v.y.wide()}; }

// The names that both formats share.
#define SHARED_NAMES(T, T2)                                                                    \
    inline T2 make_##T2(T x, T y) { return {x, y}; }                                           \
    inline float __low2float(T2 v) { return v.x.wide(); }                                      \
    inline float __high2float(T2 v) { return v.y.wide(); }                                     \
    inline T __hadd(T a, T b) { return a + b; }                                                \
    inline T __hsub(T a, T b) { return a - b; }                                                \
    inline T __hmul(T a, T b) { return a * b; }                                                \
    inline T __hdiv(T a, T b) { return a / b; }                                                \
    inline T __hneg(T a) { return -a; }                                                        \
    inline T __habs(T a) { return fabsf(a.wide()); }                                           \
    inline T __hfma(T a, T b, T c) { return fmaf(a.wide(), b.wide(), c.wide()); }              \
    inline T __hmax(T a, T b) { return fmaxf(a.wide(), b.wide()); }                            \
    inline T __hmin(T a, T b) { return fminf(a.wide(), b.wide()); }                            \
    inline bool __heq(T a, T b) { return a == b; }                                             \
    inline bool __hne(T a, T b) { return a != b; }                                             \
    inline bool __hgt(T a, T b) { return a > b; }                                              \
    inline bool __hlt(T a, T b) { return a < b; }                                              \
    inline bool __hge(T a, T b) { return a >= b; }                                             \
    inline bool __hle(T a, T b) { return a <= b; }                                             \
    inline bool __hisnan(T a) { return a != a; }                                               \
    inline T hexp(T a) { return expf(a.wide()); }                                              \
    inline T hlog(T a) { return logf(a.wide()); }                                              \
    inline T hsqrt(T a) { return sqrtf(a.wide()); }                                            \
    inline T hrsqrt(T a) { return 1.0f / sqrtf(a.wide()); }                                    \
    inline T htanh(T a) { return tanhf(a.wide()); }                                            \
    inline T2 __hadd2(T2 a, T2 b) { return a + b; }                                            \
    inline T2 __hsub2(T2 a, T2 b) { return a - b; }                                            \
    inline T2 __hmul2(T2 a, T2 b) { return a * b; }                                            \
    inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }             \
    inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }             \
    inline T2 h2exp(T2 a) { return {hexp(a.x), hexp(a.y)}; }                                   \
    inline T2 h2tanh(T2 a) { return {htanh(a.x), htanh(a.y)}; }
SHARED_NAMES(__half, __half2)
SHARED_NAMES(__nv_bfloat16, __nv_bfloat162)
#undef SHARED_NAMES

// CUDA's functions of numbers and bits, and loads and stores that say how they are cached.
#pragma once

template <class A, class B>
constexpr auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmax(T(a), T(b)));
    else return T(a) < T(b) ? T(b) : T(a);
}
template <class A, class B>
constexpr auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return T(fmin(T(a), T(b)));
    else return T(b) < T(a) ? T(b) : T(a);
}

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float normcdff(float x) { return 0.5f * erfcf(x * -0.70710678118654752f); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
// Approximate on a GPU; here as good as the C library.
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
#define __sincosf(x, sine, cosine) (*(sine) = sinf(x), *(cosine) = cosf(x))  // glibc has the name
inline float __tanhf(float x) { return tanhf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
// Never contracted into a multiply-add, on a GPU or here.
#define ROUNDED inline __attribute__((optimize("fp-contract=off"), noinline))
ROUNDED float __fadd_rn(float x, float y) { return x + y; }
ROUNDED float __fsub_rn(float x, float y) { return x - y; }
ROUNDED float __fmul_rn(float x, float y) { return x * y; }
#undef ROUNDED

#define LOAD(name)                               \
    template <class T>                           \
    __forceinline__ T name(const T* address) {   \
        return *address;                         \
    }
LOAD(__ldg) LOAD(__ldca) LOAD(__ldcg) LOAD(__ldcs) LOAD(__ldlu) LOAD(__ldcv)
#undef LOAD
#define STORE(name)                                                   \
    template <class T>                                                \
    __forceinline__ void name(T* address, emulator::same<T> value) {  \
        *address = value;                                             \
    }
STORE(__stwb) STORE(__stcg) STORE(__stcs) STORE(__stwt)
#undef STORE
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
    return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
    return (unsigned long long)__brev(x) << 32 | __brev(x >> 32);
}
inline int __mul24(int x, int y) { return x * y; }
inline int __mulhi(int x, int y) { return int((long long)x * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
inline long long clock64() { return emulator_clock(); }
inline long clock() { return emulator_clock(); }

template <class To, class From>
To emulator_bits(From value) {
    To bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline int __float_as_int(float x) { return emulator_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator_bits<double>(x); }
#define TO_INTEGER(from, to, T)                                                                  \
    inline T __##from##2##to##_rn(from x) { return emulator::to_integer<T>(from(rint(x))); }     \
    inline T __##from##2##to##_rz(from x) { return emulator::to_integer<T>(x); }                 \
    inline T __##from##2##to##_rd(from x) { return emulator::to_integer<T>(from(floor(x))); }    \
    inline T __##from##2##to##_ru(from x) { return emulator::to_integer<T>(from(ceil(x))); }
TO_INTEGER(float, int, int)
TO_INTEGER(float, uint, unsigned)
TO_INTEGER(float, ll, long long)
TO_INTEGER(float, ull, unsigned long long)
TO_INTEGER(double, int, int)
TO_INTEGER(double, uint, unsigned)
TO_INTEGER(double, ll, long long)
TO_INTEGER(double, ull, unsigned long long)
#undef TO_INTEGER
inline float __int2float_rn(int x) { return float(x); }

#define CUDART_INF_F __builtin_inff()
#define CUDART_NAN_F __builtin_nanf("")
#define CUDART_INF __builtin_inf()
#define CUDART_NAN __builtin_nan("")
#define CUDART_PI_F 3.141592654f
#define CUDART_PI 3.1415926535897931
#define CUDART_SQRT_TWO_F 1.414213562f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f

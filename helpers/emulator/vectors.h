// CUDA's short vectors and 16-bit floats. A GPU moves a vector in one access.
#pragma once
#include <math.h>
#include <stdint.h>

#include <limits>
#include <type_traits>

namespace emulator {
template <class T>
using same = std::remove_reference_t<T&>;  // in a parameter: not deduced

template <int bytes>
struct word;
#define WORD(n, type) \
    template <>       \
    struct word<n> { \
        typedef type __attribute__((may_alias)) of; \
    };
WORD(2, uint16_t)
WORD(4, uint32_t)
WORD(8, uint64_t)
WORD(16, unsigned __int128)
#undef WORD

// Saturates, as a GPU does: infinity is the largest integer. NaN is 0, or for 64 bits 1 << 63 (PTX
// ISA, cvt). A plain cast of a kernel is the CPU's own and does not saturate.
template <class To, class From>
To to_integer(From x) {
    using Limits = std::numeric_limits<To>;
    constexpr From bound = From(Limits::max() / 2 + 1) * 2;  // the first too large
    if (x != x) return sizeof(To) < 8 && sizeof(From) < 8 ? 0 : To(1) << (8 * sizeof(To) - 1);
    if (x >= bound) return Limits::max();
    return x <= From(Limits::min()) ? Limits::min() : To(x);
}

// The empty asm keeps the compiler from loading or storing the parts one by one.
template <class T>
__attribute__((always_inline, artificial)) inline void copy(T* to, const T* from) {
    constexpr int most = sizeof(T) < 16 ? sizeof(T) : 16;
    using Word = typename word<most>::of;
    for (unsigned i = 0; i < sizeof(T) / most; i++) {
        Word bits = reinterpret_cast<const Word*>(from)[i];
        asm("" : "+r"(bits));
        reinterpret_cast<Word*>(to)[i] = bits;
    }
}
}  // namespace emulator

#define MOVES_WHOLE(name)                                                                       \
    name() = default;                                                                           \
    __attribute__((always_inline, artificial)) name(const name& other) {                        \
        emulator::copy(this, &other);                                                           \
    }                                                                                           \
    __attribute__((always_inline, artificial)) name& operator=(const name& other) {             \
        emulator::copy(this, &other);                                                           \
        return *this;                                                                           \
    }

#define VECTOR2(T, name)                                      \
    struct alignas(2 * sizeof(T)) name##2 {                   \
        T x, y;                                               \
        MOVES_WHOLE(name##2)                                  \
        name##2(T x, T y = 0) : x(x), y(y) {}                 \
    };                                                        \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }
#define VECTORS(T, name)                                                            \
    VECTOR2(T, name)                                                                \
    struct name##1 {                                                                \
        T x;                                                                        \
    };                                                                              \
    struct name##3 {                                                                \
        T x, y, z;                                                                  \
    };                                                                              \
    struct alignas(sizeof(T) < 8 ? 4 * sizeof(T) : 16) name##4 {                    \
        T x, y, z, w;                                                               \
        MOVES_WHOLE(name##4)                                                        \
        name##4(T x, T y = 0, T z = 0, T w = 0) : x(x), y(y), z(z), w(w) {}         \
    };                                                                              \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }              \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(signed char, char)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
VECTORS(unsigned short, ushort)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(float, float)
VECTORS(double, double)
VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#include "narrow.h"

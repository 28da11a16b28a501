// CUDA's short vectors and 16-bit floats. A GPU moves a vector in one access.
#pragma once
#include <math.h>
#include <stdint.h>

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

// The empty asm keeps the compiler from loading or storing the parts one by one.
template <class T>
__attribute__((always_inline, artificial)) inline void copy(T* to, const T* from) {
    using Word = typename word<sizeof(T)>::of;
    Word bits = *reinterpret_cast<const Word*>(from);
    asm("" : "+r"(bits));
    *reinterpret_cast<Word*>(to) = bits;
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
        name##2(T x, T y) : x(x), y(y) {}           \
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
    struct alignas(4 * sizeof(T)) name##4 {                                         \
        T x, y, z, w;                                                               \
        MOVES_WHOLE(name##4)                                                        \
        name##4(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}           \
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
VECTOR2(double, double)
VECTOR2(long long, longlong)
VECTOR2(unsigned long long, ulonglong)

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

#include "narrow.h"

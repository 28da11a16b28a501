// Calls a kernel with arguments that stand at given addresses, and says what it takes.
#pragma once
#include <stdint.h>

#include <utility>

namespace emulator {
struct Parameters {
    uint64_t count;
    struct {
        uint64_t bytes, is_pointer, is_floating;
    } of[64];
};

template <class... T>
constexpr Parameters parameters(void (*)(T...)) {
    static_assert(sizeof...(T) <= 64, "a kernel takes at most 64 arguments here");
    return {sizeof...(T), {{sizeof(T), std::is_pointer_v<T>, std::is_floating_point_v<T>}...}};
}

template <class... T, size_t... I>
__attribute__((no_sanitize("thread"), no_sanitize_coverage, always_inline)) inline void call(
    void (*kernel)(T...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<T*>(arguments[I])...);
}

template <class... T>
__attribute__((no_sanitize("thread"), no_sanitize_coverage, always_inline)) inline void call(
    void (*kernel)(T...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<T...>());
}
}  // namespace emulator

// After the kernel's text, whose unnamed namespace it ends.
#define EMULATOR_LAUNCH(...)                                                                  \
    constexpr auto emulator_launched = &__VA_ARGS__;                                          \
    }                                                                                         \
    extern "C" __attribute__((visibility("default"))) emulator::Parameters                    \
        emulator_parameters = emulator::parameters(emulator_launched);                        \
    extern "C" __attribute__((no_sanitize("thread"), no_sanitize_coverage)) void              \
    emulator_kernel(void** arguments) {                                                       \
        emulator::call(emulator_launched, arguments);                                         \
    }

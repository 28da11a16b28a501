// Sees every load and store of a kernel before it happens, and checks it.
//
// The kernel is compiled with -fsanitize=thread, which calls a function before each access, and
// with -fsanitize=bounds, which calls one for a wrong index of an array; here are those functions.
// A wrong access never happens: the thread is left where it stands.
#include <link.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime.h"

extern "C" {
alignas(1024) char emulator_dynamic_shared[232448];  // as much as an H100 gives to a block
extern char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern volatile int32_t emulator_stop;
}

// Who touched a byte of shared memory last, and when: times count barriers. Several threads are
// a warp's number with WARP, or ALL.
struct Touch {
    uint32_t written, read;
    uint16_t writer, reader;
};
constexpr uint16_t WARP_FLAG = 0x8000, ATOMIC_FLAG = 0x4000, ALL = 0xffff;
static std::vector<Touch> touches;

// A store that meets another thread's: no race if it leaves what was there.
static struct {
    uint64_t address, size, before[2], pc;
    uint32_t other;
} meeting;

static uint64_t static_begin, static_bytes, image_begin, image_end;

// ---- Checks ----

[[noreturn]] static void fault(FaultKind kind, uint64_t address, uint64_t bytes, Kind access,
                               uint64_t pc, uint32_t other = 0) {
    Fault fault{};
    fault.kind = kind;
    fault.address = address;
    fault.bytes = bytes;
    fault.access = access;
    fault.pc = pc;
    fault.other_thread = other;
    leave(fault);
}

// True when what the thread (or threads) `who` did at `when` comes before what the current thread
// does now: a __syncthreads between, a __syncwarp of the same warp, or one thread.
static bool ordered(uint16_t who, uint32_t when) {
    if (when < block_time || who == current->thread) return true;
    const bool same_warp = who & WARP_FLAG ? who == (WARP_FLAG | current->warp)
                                           : (who & 0x3fff) / 32 == current->warp;
    return who != ALL && same_warp && when < warp_time[current->warp];
}

// Called before whatever the thread does next.
void settle() {
    if (__builtin_expect(!meeting.size, 1)) return;
    const auto [address, size, before, pc, other] = meeting;
    meeting.size = 0;
    if (std::memcmp(reinterpret_cast<const void*>(address), before, size))
        fault(RACE, address, size, SHARED_STORE, pc, other);
}

static void check_race(uint64_t offset, uint64_t size, Kind kind, uint64_t address, uint64_t pc) {
    const uint16_t me = current->thread;
    const bool atomic = kind == SHARED_ATOMIC;
    for (Touch* touch = &touches[offset]; touch != &touches[offset] + size; touch++) {
        const bool by_atomic = touch->writer != ALL && touch->writer & ATOMIC_FLAG;
        const uint16_t writer = by_atomic ? touch->writer & ~ATOMIC_FLAG : touch->writer;
        bool met = false;
        if (!(atomic && (by_atomic || touch->writer == ALL)) && !ordered(writer, touch->written)) {
            const uint32_t other = writer == ALL ? me : writer;
            if (kind != SHARED_STORE) fault(RACE, address, size, kind, pc, other);
            meeting = {address, size, {}, pc, other};
            std::memcpy(meeting.before, reinterpret_cast<const void*>(address), size);
            met = true;
        }
        if (kind == SHARED_LOAD) {
            if (touch->reader != me && !ordered(touch->reader, touch->read))
                touch->reader = touch->reader != ALL &&
                                        (touch->reader & WARP_FLAG ? touch->reader & 31
                                                                   : touch->reader / 32) ==
                                            current->warp
                                    ? WARP_FLAG | current->warp
                                    : ALL;
            else
                touch->reader = me;
            touch->read = now;
            continue;
        }
        if (!ordered(touch->reader, touch->read))
            fault(RACE, address, size, kind, pc, touch->reader & WARP_FLAG ? me : touch->reader);
        // Atomics of several threads do not race with one another.
        const bool several = atomic && touch->written >= block_time && touch->writer != me &&
                             touch->writer != (me | ATOMIC_FLAG);
        const bool plain = !atomic || (touch->written >= block_time && touch->writer == me);
        touch->writer = met ? ALL : plain ? me : several ? ALL : me | ATOMIC_FLAG;
        touch->written = now;
    }
}

// kind: LOAD, STORE or ATOMIC; size: a power of two up to 16.
static inline void access(uint64_t address, unsigned size, Kind kind, uint64_t pc) {
    if (!current) return;
    settle();
    const uint64_t stack = reinterpret_cast<uint64_t>(current->stack);
    if (address - stack < STACK_BYTES) return;  // a local variable
    for (uint64_t i = 0; i < launch->buffer_count; i++) {
        Buffer& buffer = launch->buffers[i];
        if (address < buffer.begin || address + size > buffer.end) continue;
        if (address & (size - 1)) fault(MISALIGNED, address, size, kind, pc);
        buffer.written |= kind != LOAD;
        return log_access(address, size, kind, pc);
    }
    const uint64_t dynamic = reinterpret_cast<uint64_t>(emulator_dynamic_shared);
    const Kind shared = Kind(kind + SHARED_LOAD);
    uint64_t offset = address - static_begin;
    if (offset >= static_bytes || offset + size > static_bytes) {
        offset = address - dynamic;
        if (offset >= launch->shared_bytes || offset + size > launch->shared_bytes) {
            // The constants of the kernel's text lie in its image.
            const bool image = kind == LOAD && address >= image_begin && address < image_end;
            if (image && address - dynamic >= sizeof emulator_dynamic_shared) return;
            fault(OUT_OF_BOUNDS, address, size, kind, pc);
        }
        offset += static_bytes;
    }
    if (address & (size - 1)) fault(MISALIGNED, address, size, shared, pc);
    log_access(address, size, shared, pc);  // first: it may yield
    check_race(offset, size, shared, address, pc);
}

// A structure without an alignment of its own: a GPU moves it in words, or in bytes.
static void access_range(uint64_t address, uint64_t size, Kind kind, uint64_t pc) {
    const uint64_t step = (address | size) % 4 == 0 ? 4 : (address | size) % 2 == 0 ? 2 : 1;
    for (uint64_t i = 0; i < size; i += step) access(address + i, step, kind, pc);
}

#define PC reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define CALLBACKS(size)                                                                       \
    void __tsan_read##size(uint64_t address) { access(address, size, LOAD, PC); }             \
    void __tsan_write##size(uint64_t address) { access(address, size, STORE, PC); }           \
    void __tsan_unaligned_read##size(uint64_t a) { access_range(a, size, LOAD, PC); }         \
    void __tsan_unaligned_write##size(uint64_t a) { access_range(a, size, STORE, PC); }       \
    void __tsan_volatile_read##size(uint64_t address) { access(address, size, LOAD, PC); }    \
    void __tsan_volatile_write##size(uint64_t address) { access(address, size, STORE, PC); }
extern "C" {
CALLBACKS(1)
CALLBACKS(2)
CALLBACKS(4)
CALLBACKS(8)
CALLBACKS(16)
void __tsan_read_range(uint64_t address, uint64_t size) { access_range(address, size, LOAD, PC); }
void __tsan_write_range(uint64_t address, uint64_t size) { access_range(address, size, STORE, PC); }
void __tsan_vptr_update(uint64_t address, void*) { access(address, 8, STORE, PC); }
void __tsan_vptr_read(uint64_t address) { access(address, 8, LOAD, PC); }
void __tsan_func_exit() {}
void __tsan_init() {}

void __tsan_func_entry(void*) {
    char here;
    if (current && &here < current->stack + STACK_RESERVE) fault(STACK, 0, 0, LOAD, PC);
}

void emulator_atomic(void* address, unsigned size, uint64_t pc) {
    access(reinterpret_cast<uint64_t>(address), size, ATOMIC, pc);
}

struct Place {
    const char* file;
    uint32_t line, column;
};
struct Type {
    uint16_t kind, info;
    char name[];
};
struct Indexed {
    Place place;
    const Type *array, *index;
};

void __ubsan_handle_out_of_bounds(const Indexed* data, uint64_t index) {
    Fault fault{};
    fault.kind = INDEX;
    fault.line = data->place.line;
    const unsigned unused = 64 - (1u << (data->index->info >> 1));
    fault.index = data->index->info & 1 ? int64_t(index << unused) >> unused : index;
    std::strncpy(fault.type, data->array->name, sizeof fault.type - 1);
    leave(fault);
}

void __ubsan_handle_divrem_overflow(const Place* place, uint64_t, uint64_t) {
    Fault fault{};
    fault.kind = DIVISION;
    fault.line = place->line;
    leave(fault);
}
}

// ---- A launch ----

// The kernel's own variables: what its shared library maps to be read or written.
static int find_image(dl_phdr_info* info, size_t, void*) {
    const uint64_t here = reinterpret_cast<uint64_t>(&find_image);
    uint64_t begin = ~0ull, end = 0;
    bool found = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr)& segment = info->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD) continue;
        const uint64_t first = info->dlpi_addr + segment.p_vaddr;
        found |= here >= first && here < first + segment.p_memsz;
        begin = std::min(begin, first);
        end = std::max(end, first + segment.p_memsz);
    }
    if (found) launch->image = info->dlpi_addr, image_begin = begin, image_end = end;
    return found;
}

extern "C" __attribute__((visibility("default"))) uint64_t emulator_static_shared_bytes() {
    return __start_cuda_shared ? __stop_cuda_shared - __start_cuda_shared : 0;
}

void begin_checking() {
    static_begin = reinterpret_cast<uint64_t>(__start_cuda_shared);
    static_bytes = emulator_static_shared_bytes();
    dl_iterate_phdr(find_image, nullptr);
    launch->static_shared = static_begin;
    launch->static_shared_bytes = static_bytes;
    launch->dynamic_shared = reinterpret_cast<uint64_t>(emulator_dynamic_shared);
    meeting.size = 0;
    touches.assign(static_bytes + launch->shared_bytes, Touch{});
}

// What a kernel reads without having written it is NaN, as a float of any width.
void begin_block() {
    if (static_bytes) std::memset(__start_cuda_shared, 0xff, static_bytes);
    std::memset(emulator_dynamic_shared, 0xff, launch->shared_bytes);
}

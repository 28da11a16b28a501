// What the files of the runtime share, and what Python passes in and reads back.
// Python's copies of the structs stand in helpers/emulator/library.py: same fields, same order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

struct uint3 {
    unsigned x, y, z;
};

enum Kind : uint32_t { LOAD, STORE, ATOMIC, SHARED_LOAD, SHARED_STORE, SHARED_ATOMIC };

enum FaultKind : int32_t {
    NONE,
    OUT_OF_BOUNDS,
    MISALIGNED,
    BARRIER,
    WARP,
    RACE,
    STOPPED,
    DIVISION,
    STACK,
    CRASH,
    INDEX,  // outside a static array: what -fsanitize=bounds reports
    TRAP    // __trap or a failed assert
};

struct Fault {
    int32_t kind, line, other_line;  // lines of the kernel's text, 0 when unknown
    uint32_t block[3], thread, other_thread, count, other_count, mask, access;
    uint64_t address, bytes, pc;
    int64_t index;
    char type[64];  // of the array that was indexed, or the text of what failed
};

struct Buffer {
    uint64_t begin, end, written;  // addresses; whether the kernel wrote to it
};

// One load or store instruction of the kernel, by its address in the machine code.
struct Site {
    uint64_t pc, kind, size, threads, requests, sectors, lines, bank_conflicts;
};

struct Access {
    uint64_t pc, address;
    uint32_t block, thread, kind, size;
};

struct Launch {
    uint32_t grid[3], block[3];
    void** arguments;
    Buffer* buffers;
    uint64_t buffer_count, shared_bytes;
    int64_t order;  // -1 forward, -2 reverse, else a seed
    uint64_t count_branches, trace_capacity;
    Access* trace;
    // Results.
    uint64_t trace_count, site_count, barriers, shuffles, blocks_executed, blocks_issued;
    uint64_t image, static_shared, dynamic_shared;  // addresses
    uint64_t static_shared_bytes;
    Site* sites;
    Fault fault;
};

enum State : uint8_t { READY, AT_BARRIER, AT_WARP, ENDED };

// One CUDA thread.
struct Lane {
    void* context;  // its stack pointer, or its ucontext
    char* stack;    // the lowest address
    uint3 index;
    uint32_t thread, warp, lane;
    State state;
    int32_t line;  // where it waits
    int32_t operation, source;
    uint32_t mask, ballot;
    uint64_t value, result;
};

constexpr size_t STACK_BYTES = 256 << 10, STACK_RESERVE = 16 << 10;
// Stacks a power of two apart would all fall into the same sets of the cache.
constexpr size_t STACK_STRIDE = STACK_BYTES + 4416;

extern Launch* launch;
extern std::vector<Lane> lanes;  // of the block that runs
extern Lane* current;  // the thread that runs; null outside of kernels
extern uint3 block_position;
extern uint32_t block_index;
extern uint32_t now, block_time, warp_time[32];  // a count of barriers; when the last ones were
extern bool log_full;

void report(Lane& lane, Fault fault);  // from the scheduler: what the lane did wrong
[[noreturn]] void leave(Fault fault);  // to the scheduler, for good
void yield();                          // to the scheduler, to be continued

// waiting.cpp
bool release_warp(Lane* warp, unsigned count);
bool release_block();
void report_deadlock();

// memory.cpp
void begin_checking();
void begin_block();
void settle();

// counts.cpp
void begin_counting();
void log_access(uint64_t address, unsigned size, Kind kind, uint64_t pc);
void merge_warp(unsigned lanes);
void end_warp(unsigned warp);
void end_counting();

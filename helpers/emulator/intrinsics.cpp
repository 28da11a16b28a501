// What a kernel calls by way of cuda.h.
#include <cstring>

#include "runtime.h"

extern "C" {
uint3 emulator_thread_index() { return current->index; }
uint3 emulator_block_index() { return block_position; }
uint3 emulator_block_size() { return {launch->block[0], launch->block[1], launch->block[2]}; }
uint3 emulator_grid_size() { return {launch->grid[0], launch->grid[1], launch->grid[2]}; }

int emulator_barrier(int line, int value) {
    Lane& lane = *current;
    lane.line = line;
    lane.value = value;
    lane.state = AT_BARRIER;
    yield();
    return lane.result;
}

void emulator_trap(int line, const char* what) {
    Fault fault{};
    fault.kind = TRAP;
    fault.line = line;
    std::strncpy(fault.type, what, sizeof fault.type - 1);
    leave(fault);
}

// operation: 0 __syncwarp, 1 a shuffle, 2 a vote, from 3 on a reduction (waiting.cpp).
uint64_t emulator_warp(int operation, unsigned mask, uint64_t value, int source, int line,
                       unsigned* ballot) {
    Lane& lane = *current;
    if (!(mask >> lane.lane & 1)) {
        Fault fault{};
        fault.kind = WARP;
        fault.mask = mask;
        fault.line = line;
        leave(fault);
    }
    lane.operation = operation;
    lane.mask = mask;
    lane.value = value;
    lane.source = source;
    lane.line = line;
    lane.state = AT_WARP;
    yield();
    *ballot = lane.ballot;
    return lane.result;
}

long long emulator_clock() {
    static long long ticks;
    return ++ticks;
}

unsigned emulator_lane() { return current->lane; }
}

// Who waits for whom: when a warp's lanes or a block's threads go on together, or never can.
#include <algorithm>

#include "runtime.h"

static uint32_t reduce(int operation, const Lane* warp, uint32_t named) {
    const unsigned first = __builtin_ctz(named);
    uint32_t all = warp[first].value;
    for (unsigned k = first + 1; k < 32; k++) {
        if (!(named >> k & 1)) continue;
        const uint32_t value = warp[k].value;
        switch (operation) {
            case 3: all &= value; break;
            case 4: all |= value; break;
            case 5: all ^= value; break;
            case 6: all += value; break;
            case 7: all = std::min(all, value); break;
            case 8: all = std::max(all, value); break;
        }
    }
    return all;
}

// Lanes that wait for one another at the same operation go on once all that the mask names are
// there. Lanes beyond the end of a block do not exist and are not waited for.
bool release_warp(Lane* warp, unsigned count) {
    const uint32_t present = count == 32 ? ~0u : (1u << count) - 1;
    bool released = false;
    for (unsigned first = 0; first < count; first++) {
        const Lane& one = warp[first];
        if (one.state != AT_WARP) continue;
        const uint32_t named = one.mask & present;
        uint32_t here = 0, ballot = 0;
        for (unsigned k = 0; k < count; k++) {
            const Lane& lane = warp[k];
            if (named >> k & 1 && lane.state == AT_WARP && lane.mask == one.mask &&
                lane.line == one.line && lane.operation == one.operation) {
                here |= 1u << k;
                ballot |= uint32_t(lane.value != 0) << k;
            }
        }
        if (here != named) continue;
        const uint64_t together = one.operation > 2 ? reduce(one.operation, warp, named) : 0;
        for (unsigned k = 0; k < count; k++) {
            if (!(named >> k & 1)) continue;
            if (one.operation == 1 && !(named >> warp[k].source & 1)) {
                Fault fault{};
                fault.kind = WARP;
                fault.line = one.line;
                fault.mask = one.mask;
                fault.count = warp[k].source + 1;
                report(warp[k], fault);
                return false;
            }
            warp[k].result = one.operation == 1 ? warp[warp[k].source].value : together;
            warp[k].ballot = ballot;
            warp[k].state = READY;
        }
        if (one.operation == 0) warp_time[one.warp] = ++now;  // __syncwarp orders memory
        launch->shuffles += one.operation == 1;
        released = true;
    }
    return released;
}

// True when all threads waited at one barrier; they then go on. Barriers, and operations of a warp,
// are told apart by their lines alone: two on one line, or in a function that both branches call,
// are taken for one. (The address of the call would not do: compilers copy code.)
bool release_block() {
    uint64_t sum = 0;
    for (const Lane& lane : lanes) {
        if (lane.state != AT_BARRIER || lane.line != lanes[0].line) return false;
        sum += lane.value;
    }
    for (Lane& lane : lanes) {
        lane.result = sum;
        lane.state = READY;
    }
    launch->barriers++;
    return true;
}

// Nobody can go on: tell who waits, and one of those that do not come.
void report_deadlock() {
    Fault fault{};
    Lane* waiting = nullptr;
    for (Lane& lane : lanes)
        if (lane.state == AT_WARP || (lane.state == AT_BARRIER && !waiting))
            if (!waiting || waiting->state != AT_WARP) waiting = &lane;
    fault.kind = waiting->state == AT_WARP ? WARP : BARRIER;
    fault.line = waiting->line;
    fault.mask = waiting->mask;
    Lane* missing = nullptr;
    for (Lane& lane : lanes) {
        const bool named = fault.kind == BARRIER ||
                           (lane.warp == waiting->warp && waiting->mask >> lane.lane & 1);
        const bool together = lane.state == waiting->state && lane.line == waiting->line &&
                              (fault.kind == BARRIER || (lane.mask == waiting->mask &&
                                                         lane.operation == waiting->operation));
        if (named && together) fault.count++;
        if (named && !together && !fault.other_count++) missing = &lane;
    }
    if (missing) {
        fault.other_thread = missing->thread;
        fault.other_line = missing->state == ENDED ? 0 : missing->line;
    }
    report(*waiting, fault);
}

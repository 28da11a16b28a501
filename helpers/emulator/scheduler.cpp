// Runs a kernel: one fiber per CUDA thread, one block after the other, on one thread of the CPU.
//
// A thread runs until it ends or waits: at __syncthreads, or at a shuffle or other operation of its
// warp. What it waits for is then exact, whatever the divergence: all threads of the block, or the
// lanes that the mask names. memory.cpp sees every access and checks and counts it.
#include "runtime.h"

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>

extern "C" void emulator_kernel(void** arguments);
extern "C" {
__attribute__((visibility("default"))) volatile int32_t emulator_stop;
}

Launch* launch;
Lane* current;
uint3 block_position;
uint32_t block_index, now, block_time, warp_time[32];

static std::vector<Lane> lanes;
static void* scheduler;  // its context while a fiber runs
static pthread_t runner;

// ---- Fibers ----

static void fiber() {
    emulator_kernel(launch->arguments);
    current->state = ENDED;
    yield();
    abort();  // an ended fiber is never continued
}

#include "fibers.h"

void yield() { emulator_switch(&current->context, scheduler); }

void leave(Fault fault) {
    std::memcpy(fault.block, &block_position, sizeof fault.block);
    fault.thread = current->thread;
    launch->fault = fault;
    yield();
    abort();
}

// Sent by library.py to a loop so short that it never comes to ask for emulator_stop.
constexpr int STOP_SIGNAL = SIGURG;  // ignored by whom it reaches too late

static void on_signal(int signal) {
    if (current && pthread_equal(pthread_self(), runner)) {
        Fault fault{};
        fault.kind = emulator_stop ? STOPPED : signal == SIGFPE ? DIVISION : CRASH;
        leave(fault);
    }
    if (signal == STOP_SIGNAL) return;
    std::signal(signal, SIG_DFL);  // not ours: it happens again, and ends the process
}

// ---- The scheduler ----

// Lanes that wait for one another at the same operation go on once all that the mask names are
// there. Lanes beyond the end of a block do not exist and are not waited for.
static bool release(Lane* warp, unsigned count) {
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
        for (unsigned k = 0; k < count; k++) {
            if (!(named >> k & 1)) continue;
            const unsigned source = warp[k].source & 31;
            warp[k].result = warp[named >> source & 1 ? source : k].value;
            warp[k].ballot = ballot;
            warp[k].state = READY;
        }
        if (one.operation == 0) warp_time[one.warp] = ++now;  // __syncwarp orders memory
        launch->shuffles += one.operation == 1;
        released = true;
    }
    return released;
}

static void run_warp(unsigned warp, const std::vector<unsigned>& order) {
    Lane* first = &lanes[warp * 32];
    const unsigned count = std::min<size_t>(32, lanes.size() - warp * 32);
    bool ran = false;
    log_full = false;
    do {
        for (unsigned k : order) {
            if (k >= count || first[k].state != READY) continue;
            current = &first[k];
            emulator_switch(&scheduler, current->context);
            current = nullptr;
            if (launch->fault.kind) return;
            ran = true;
        }
    } while (release(first, count) && !log_full);
    if (!ran) return;
    merge_warp(count);
    for (unsigned k = 0; k < count; k++)
        if (first[k].state != ENDED) return;
    end_warp(warp);
}

// Nobody can go on: tell who waits, and one of those that do not come.
static void report_deadlock() {
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
    current = waiting;
    std::memcpy(fault.block, &block_position, sizeof fault.block);
    fault.thread = waiting->thread;
    launch->fault = fault;
    current = nullptr;
}

// For std::shuffle; <random> would take longer to compile than all the rest.
struct Random {
    using result_type = uint32_t;
    uint64_t state;
    static constexpr uint32_t min() { return 0; }
    static constexpr uint32_t max() { return ~0u; }
    uint32_t operator()() {
        state = state * 6364136223846793005 + 1442695040888963407;  // Knuth's MMIX
        return state >> 32;
    }
};

static void run_block(Random& random) {
    const unsigned warps = (lanes.size() + 31) / 32;
    std::vector<unsigned> order(32), warp_order(warps);
    for (auto* numbers : {&order, &warp_order}) {
        std::iota(numbers->begin(), numbers->end(), 0);
        if (launch->order == -2) std::reverse(numbers->begin(), numbers->end());
        if (launch->order >= 0) std::shuffle(numbers->begin(), numbers->end(), random);
    }
    for (Lane& lane : lanes) {
        lane.state = READY;
        start(lane);
    }
    begin_block();
    for (;;) {
        block_time = ++now;
        unsigned ready, ended, waiting;
        do {
            for (unsigned warp : warp_order) {
                run_warp(warp, order);
                if (launch->fault.kind) return;
            }
            ready = ended = waiting = 0;
            for (const Lane& lane : lanes) {
                ready += lane.state == READY;
                ended += lane.state == ENDED;
                waiting += lane.state == AT_BARRIER && lane.line == lanes[0].line;
            }
        } while (ready);
        if (ended == lanes.size()) return;
        if (waiting != lanes.size()) return report_deadlock();
        for (Lane& lane : lanes) lane.state = READY;
        launch->barriers++;
    }
}

extern "C" __attribute__((visibility("default"))) void emulator_run(Launch* request) {
    launch = request;
    runner = pthread_self();
    now = 0;
    const uint32_t* block = launch->block;
    const size_t threads = size_t(block[0]) * block[1] * block[2];
    const size_t bytes = (threads + 4) * STACK_STRIDE;  // some below the last one, see STACK
    char* stacks = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks == MAP_FAILED) abort();
    lanes.assign(threads, Lane{});
    for (uint32_t t = 0; t < threads; t++) {
        lanes[t].thread = t;
        lanes[t].warp = t / 32;
        lanes[t].lane = t % 32;
        lanes[t].index = {t % block[0], t / block[0] % block[1], t / block[0] / block[1]};
        lanes[t].stack = stacks + (t + 4) * STACK_STRIDE;
    }
    struct sigaction ours {}, before[4];
    const int signals[4] = {SIGSEGV, SIGBUS, SIGFPE, STOP_SIGNAL};
    ours.sa_handler = on_signal;
    ours.sa_flags = SA_NODEFER;  // the handler does not return
    for (int i = 0; i < 4; i++) sigaction(signals[i], &ours, &before[i]);

    begin_checking();
    begin_counting();
    const uint32_t* grid = launch->grid;
    Random random{uint64_t(launch->order)};
    std::vector<uint32_t> blocks(size_t(grid[0]) * grid[1] * grid[2]);
    std::iota(blocks.begin(), blocks.end(), 0);
    if (launch->order == -2) std::reverse(blocks.begin(), blocks.end());
    if (launch->order >= 0) std::shuffle(blocks.begin(), blocks.end(), random);
    for (uint32_t b : blocks) {
        block_index = b;
        block_position = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block(random);
        if (launch->fault.kind) break;
    }
    end_counting();
    for (int i = 0; i < 4; i++) sigaction(signals[i], &before[i], nullptr);
    munmap(stacks, bytes);
}

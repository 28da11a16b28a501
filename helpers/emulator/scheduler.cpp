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

std::vector<Lane> lanes;
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

void yield() {
    settle();
    emulator_switch(&current->context, scheduler);
}

void report(Lane& lane, Fault fault) {
    std::memcpy(fault.block, &block_position, sizeof fault.block);
    fault.thread = lane.thread;
    launch->fault = fault;
}

void leave(Fault fault) {
    report(*current, fault);
    emulator_switch(&current->context, scheduler);
    abort();
}

// Sent by library.py to a loop so short that it never comes to ask for emulator_stop.
constexpr int STOP_SIGNAL = SIGURG;  // ignored by whom it reaches too late

static void on_signal(int signal) {
    if (current && pthread_equal(pthread_self(), runner)) {
        Fault fault{};
        fault.kind = emulator_stop ? STOPPED : signal == SIGFPE ? DIVISION : CRASH;
        if (signal == SIGILL || signal == SIGABRT) {
            fault.kind = TRAP;
            std::strcpy(fault.type, signal == SIGILL ? "__builtin_trap()" : "__builtin_abort()");
        }
        leave(fault);
    }
    if (signal == STOP_SIGNAL) return;
    std::signal(signal, SIG_DFL);  // not ours: it happens again, and ends the process
}

// ---- The scheduler ----

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
    } while (release_warp(first, count) && !log_full);
    if (!ran || launch->fault.kind) return;
    merge_warp(count);
    for (unsigned k = 0; k < count; k++)
        if (first[k].state != ENDED) return;
    end_warp(warp);
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
        unsigned ready, ended;
        do {
            for (unsigned warp : warp_order) {
                run_warp(warp, order);
                if (launch->fault.kind) return;
            }
            ready = ended = 0;
            for (const Lane& lane : lanes) {
                ready += lane.state == READY;
                ended += lane.state == ENDED;
            }
        } while (ready);
        if (ended == lanes.size()) return;
        if (!release_block()) return report_deadlock();
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
    constexpr int SIGNALS = 6;
    struct sigaction ours {}, before[SIGNALS];
    const int signals[SIGNALS] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, STOP_SIGNAL};
    ours.sa_handler = on_signal;
    ours.sa_flags = SA_NODEFER;  // the handler does not return
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &ours, &before[i]);

    begin_checking();
    begin_counting();
    const uint32_t* grid = launch->grid;
    Random random{uint64_t(launch->order)};
    const uint64_t count = uint64_t(grid[0]) * grid[1] * grid[2];
    std::vector<uint32_t> shuffled(launch->order >= 0 ? count : 0);
    std::iota(shuffled.begin(), shuffled.end(), 0);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t b = launch->order == -2 ? count - 1 - i : i;
        if (launch->order >= 0) b = shuffled[i];
        block_index = b;
        block_position = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
        run_block(random);
        if (launch->fault.kind) break;
    }
    end_counting();
    for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], nullptr);
    munmap(stacks, bytes);
}

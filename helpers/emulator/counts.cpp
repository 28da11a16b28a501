// Counts what a GPU's memory and its warps would do.
//
// Accesses are logged by thread, and when the warp has stopped its lanes' logs are put side by
// side: the n-th time that a lane comes to an instruction belongs to the other lanes' n-th time.
#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "runtime.h"

extern "C" volatile int32_t emulator_stop;
bool log_full;

// A longer log is merged before all lanes have stopped. Lanes that took different ways may then
// meet an instruction on both sides of the cut: it counts twice.
constexpr unsigned LOG = 4096;
struct Record {
    uint64_t pc, where;  // the address; above its 56 bits, the kind and the size's logarithm
};
static Record logs[32][LOG];
static unsigned log_size[32];

static std::vector<Site> sites;
static std::unordered_map<uint64_t, unsigned> site_of;

void log_access(uint64_t address, unsigned size, Kind kind, uint64_t pc) {
    const unsigned lane = current->lane;
    const uint64_t tag = kind | __builtin_ctz(size) << 3;
    logs[lane][log_size[lane]++] = {pc, address | tag << 56};
    if (__builtin_expect(launch->trace_count < launch->trace_capacity, 0))
        launch->trace[launch->trace_count++] = {pc,   address, block_index, current->thread,
                                                kind, size};
    if (log_size[lane] == LOG) {
        log_full = true;
        yield();
    }
}

// ---- Basic blocks ----

static std::unordered_map<uint64_t, unsigned> block_of;
static std::vector<uint32_t> visits[32];  // of each warp: basic block x 32 lanes

extern "C" void __sanitizer_cov_trace_pc() {
    if (!current) return;
    if (__builtin_expect(emulator_stop, 0)) {
        Fault fault{};
        fault.kind = STOPPED;
        leave(fault);
    }
    if (!launch->count_branches) return;
    const uint64_t pc = uint64_t(__builtin_return_address(0));
    const unsigned block = block_of.emplace(pc, block_of.size()).first->second;
    std::vector<uint32_t>& counts = visits[current->warp];
    if (counts.size() <= block * 32 + 31) counts.resize(block * 32 + 32);
    counts[block * 32 + current->lane]++;
}

// A warp issues a basic block as often as the lane that comes there most.
void end_warp(unsigned warp) {
    for (auto lanes = visits[warp].begin(); lanes != visits[warp].end(); lanes += 32) {
        launch->blocks_issued += *std::max_element(lanes, lanes + 32);
        for (unsigned k = 0; k < 32; k++) launch->blocks_executed += lanes[k];
    }
    visits[warp].clear();
}

// ---- Counts ----

// What one instruction of a warp costs beyond one pass: a bank gives one word of 4 bytes a pass.
// Words of 8 and 16 bytes are served to 16 and to 8 lanes at a time.
static unsigned bank_conflicts(const uint64_t* addresses, unsigned count, unsigned size,
                               const uint8_t* lane) {
    const unsigned words = std::max(1u, size / 4), together = 32 / words;
    unsigned extra = 0;
    for (unsigned i = 0; i < count;) {
        const unsigned group = lane[i] / together;
        uint64_t seen[128];
        uint8_t last[32], before[128], passes[32];
        std::memset(last, 255, sizeof last);
        std::memset(passes, 0, sizeof passes);
        unsigned stored = 0, most = 0;
        for (; i < count && lane[i] / together == group; i++) {
            for (unsigned w = 0; w < words; w++) {
                const uint64_t word = addresses[i] / 4 + w;
                const unsigned bank = word % 32;
                uint8_t k = last[bank];
                while (k != 255 && seen[k] != word) k = before[k];
                if (k != 255) continue;
                seen[stored] = word;
                before[stored] = last[bank];
                last[bank] = stored++;
                most = std::max<unsigned>(most, ++passes[bank]);
            }
        }
        extra += most - 1;
    }
    return extra;
}

static unsigned distinct(const uint64_t* addresses, unsigned count, unsigned size) {
    uint64_t values[32];
    for (unsigned i = 0; i < count; i++) values[i] = addresses[i] / size;
    if (!std::is_sorted(values, values + count)) std::sort(values, values + count);
    return std::unique(values, values + count) - values;
}

static void count_instruction(const uint64_t* addresses, unsigned count, const uint8_t* lane,
                              uint64_t pc, unsigned tag) {
    const auto [entry, is_new] = site_of.emplace(pc << 8 | tag, sites.size());
    const unsigned size = 1u << (tag >> 3), kind = tag & 7;
    if (is_new) sites.push_back({pc, kind, size, 0, 0, 0, 0, 0});
    Site& site = sites[entry->second];
    site.threads += count;
    site.requests++;
    if (kind >= SHARED_LOAD) {
        site.bank_conflicts += bank_conflicts(addresses, count, size, lane);
    } else {
        site.sectors += distinct(addresses, count, 32);
        site.lines += distinct(addresses, count, 128);
    }
}

constexpr uint64_t ADDRESS = (1ull << 56) - 1;

static bool same_instruction(const Record& a, const Record& b) {
    return a.pc == b.pc && a.where >> 56 == b.where >> 56;
}

// Puts the lanes' logs side by side when each is the beginning of the longest.
static bool merge_converged(unsigned lanes) {
    const unsigned longest = std::max_element(log_size, log_size + lanes) - log_size;
    for (unsigned k = 0; k < lanes; k++)
        for (unsigned i = 0; i < log_size[k]; i++)
            if (!same_instruction(logs[k][i], logs[longest][i])) return false;
    for (unsigned i = 0; i < log_size[longest]; i++) {
        uint64_t addresses[32];
        uint8_t lane[32];
        unsigned count = 0;
        for (unsigned k = 0; k < lanes; k++) {
            if (log_size[k] <= i) continue;
            lane[count] = k;
            addresses[count++] = logs[k][i].where & ADDRESS;
        }
        const Record& record = logs[longest][i];
        count_instruction(addresses, count, lane, record.pc, record.where >> 56);
    }
    return true;
}

static void merge_diverged(unsigned lanes) {
    struct Entry {
        uint64_t pc, address;
        uint32_t tag, occurrence, lane;
        auto key() const { return std::make_tuple(pc, tag, occurrence, lane); }
    };
    static std::vector<Entry> entries;
    entries.clear();
    for (unsigned k = 0; k < lanes; k++) {
        std::unordered_map<uint64_t, uint32_t> occurrences;
        for (unsigned i = 0; i < log_size[k]; i++) {
            const auto [pc, where] = logs[k][i];
            const uint32_t tag = where >> 56;
            entries.push_back({pc, where & ADDRESS, tag, occurrences[pc << 8 | tag]++, k});
        }
    }
    std::sort(entries.begin(), entries.end(),
              [](const Entry& a, const Entry& b) { return a.key() < b.key(); });
    for (auto entry = entries.begin(); entry != entries.end();) {
        uint64_t addresses[32];
        uint8_t lane[32];
        unsigned count = 0;
        const Entry first = *entry;
        for (; entry != entries.end() && entry->pc == first.pc && entry->tag == first.tag &&
               entry->occurrence == first.occurrence;
             ++entry) {
            lane[count] = entry->lane;
            addresses[count++] = entry->address;
        }
        count_instruction(addresses, count, lane, first.pc, first.tag);
    }
}

void merge_warp(unsigned lanes) {
    if (!merge_converged(lanes)) merge_diverged(lanes);
    std::memset(log_size, 0, sizeof log_size);
}

// ---- A launch ----

void begin_counting() {
    sites.clear();
    site_of.clear();
    block_of.clear();
    std::memset(log_size, 0, sizeof log_size);
    for (auto& counts : visits) counts.clear();
}

void end_counting() {
    launch->sites = sites.data();
    launch->site_count = sites.size();
}

#include "emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <vector>

namespace emulator {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr int64_t kSharedBytes = 256 << 10;
constexpr int64_t kPatience = 100 << 20;

struct Fiber {
    ucontext_t begin;
    void* place[5];  // as __builtin_setjmp has it, which takes a fraction of setjmp's time
    char* stack;
    bool started;
    uint64_t cluster_phases;  // that it has waited for
    std::deque<std::function<void()>> work;  // empty functions end groups
};

// What a fiber waits for; apart from it, since all are asked very often.
struct Waiting {
    bool (*ready)(const void*);  // nullptr: for nothing
    const void* context;
    uint64_t event;

    bool is_over() const { return !ready || ready(context); }
};

struct Warp {
    std::deque<std::function<void()>> work;  // as a thread's
    void* arguments[kLanes];
    int arrived, live;
    uint64_t generation;
    void (*complete)(const void*, void* const*);
    const void* context;

    void settle() {
        if (arrived == 0 || arrived < live) return;
        complete(context, arguments);
        arrived = 0;
        ++generation;
        for (void*& argument : arguments) argument = nullptr;
    }
};

struct Barrier {
    int arrived, threads;  // 0: all that live
    uint64_t generation;
    bool any, result;

    void settle(int live) {
        if (arrived == 0 || arrived < (threads ? threads : live)) return;
        result = any;
        any = false;
        arrived = 0;
        ++generation;
    }
};

// Where a block runs.
struct Block {
    std::vector<Fiber> fibers;
    std::vector<Waiting> waiting;
    std::vector<Warp> warps;
    Barrier barriers[16];
    int live = 0, current = 0;
    uint32_t index;
    alignas(1024) char memory[kSharedBytes];
};

struct Cluster {
    int arrived, live;  // threads
    uint64_t generation;

    void settle() {
        if (arrived == 0 || arrived < live) return;
        arrived = 0;
        ++generation;
    }
};

std::mutex grids;
std::vector<Block> blocks(kMostInCluster);
Block* here;
int threads, cluster_blocks;
std::vector<Cluster> clusters;
uint32_t grid, begun;  // blocks
int64_t memory_used;
const std::function<void()>* kernel;
int64_t idle;  // how often in turn nobody had more to do than to look whether another block has gone on
jmp_buf end_of_block;
void run_thread();

std::minstd_rand draw([] {
    const char* const seed = std::getenv("EMULATOR_SEED");
    return seed ? std::atoi(seed) : 0;
}());

bool chance(int of) {
    return draw() % of == 0;
}

bool has_work(const Fiber& fiber) {
    for (const auto& work : fiber.work)
        if (work) return true;
    return false;
}

void do_first(std::deque<std::function<void()>>& queue) {
    const std::function<void()> work = std::move(queue.front());
    queue.pop_front();
    if (work) work();
}

void do_all(std::deque<std::function<void()>>& queue) {
    for (auto& work : queue)
        if (work) work(), work = [] {};
}

void do_groups(std::deque<std::function<void()>>& queue, int pending) {
    int ends = 0;
    for (const auto& work : queue) ends += !work;
    while (ends > pending) {
        ends -= !queue.front();
        do_first(queue);
    }
}

[[noreturn, gnu::noinline]] void resume(int index) {
    here->current = index;
    here->waiting[index] = {};
    Fiber& fiber = here->fibers[index];
    if (fiber.started) __builtin_longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.begin);
    fail("setcontext");
}

// Mostly the next one, which belongs to the same warp; -1 if all wait.
int next_ready() {
    int index = chance(64) ? int(draw() % threads) : here->current + 1;
    uint64_t missing = 0;  // the event that the one before waits for
    for (int i = 0; i < threads; ++i, ++index) {
        if (index >= threads) index = 0;
        const Waiting& waiting = here->waiting[index];
        if (waiting.event && waiting.event == missing) continue;
        if (waiting.is_over()) return index;
        missing = waiting.event;
    }
    return -1;
}

// Something that was started ends.
bool work_somewhere() {
    const int lucky = int(draw() % threads);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = here->fibers[(lucky + i) % threads];
        if (!has_work(fiber)) continue;
        while (!fiber.work.front()) fiber.work.pop_front();
        do_first(fiber.work);
        return true;
    }
    return false;
}

void begin_block() {
    here->index = begun++;
    std::memset(here->memory, 0xff, kSharedBytes);  // NaN
    std::memset(here->barriers, 0, sizeof(here->barriers));
    here->live = threads;
    here->warps.assign((threads + kLanes - 1) / kLanes, Warp{});
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = here->fibers[i];
        ++here->warps[i / kLanes].live;
        fiber.started = false;
        fiber.cluster_phases = 0;
        fiber.work.clear();
        here->waiting[i] = {};
        getcontext(&fiber.begin);
        fiber.begin.uc_stack = {fiber.stack, 0, kStack};
        makecontext(&fiber.begin, run_thread, 0);
    }
}

// The next block's turn, of those that run.
void change_block() {
    for (size_t i = 0; i < blocks.size(); ++i) {
        here = here != &blocks.back() ? here + 1 : &blocks.front();
        if (here->live > 0) return;
    }
}

// Who goes on, here or in another block.
[[noreturn]] void go_on() {
    if (chance(1024)) change_block();
    for (size_t tried = 0; tried < blocks.size();) {
        const int next = next_ready();
        if (next >= 0) resume(next);
        if (!work_somewhere()) change_block(), ++tried;
    }
    fail("deadlock: every thread waits");
}

void run_thread() {
    (*kernel)();
    wait_for_all();
    here->waiting[here->current].ready = [](const void*) { return false; };  // it has ended
    --here->live;
    Warp& warp = here->warps[here->current / kLanes];
    --warp.live;
    warp.settle();
    for (Barrier& barrier : here->barriers) barrier.settle(here->live);
    Cluster& cluster = clusters[here->index / cluster_blocks];
    --cluster.live;
    cluster.settle();
    if (here->live == 0) _longjmp(end_of_block, 1);
    go_on();
}

}  // namespace

void fail(const char* why) {
    std::fprintf(stderr, "emulator: %s (block %u, thread %d of %d)\n", why, here->index, here->current,
                 threads);
    std::abort();
}

void add_products(double* sums, const double* a, const double* b, int depth, int columns) {
    constexpr int kAtOnce = 8;
    for (int row = 0; row < 16; ++row)
        for (int first = 0; first < columns; first += kAtOnce) {
            double* const sum = sums + row * columns + first;
            double total[kAtOnce];
            std::copy_n(sum, kAtOnce, total);
            for (int k = 0; k < depth; ++k)
                for (int i = 0; i < kAtOnce; ++i) total[i] += a[k * 16 + row] * b[k * columns + first + i];
            std::copy_n(total, kAtOnce, sum);
        }
}

uint32_t thread_index() {
    return here->current;
}
uint32_t block_index() {
    return here->index;
}
uint32_t block_threads() {
    return threads;
}
uint32_t grid_blocks() {
    return grid;
}
char* shared_memory() {
    return here->memory;
}
int64_t shared_bytes() {
    return memory_used;
}

void wait(bool (*ready)(const void*), const void* context, uint64_t event) {
    here->waiting[here->current] = {ready, context, event};
    idle = 0;
    if (__builtin_setjmp(here->fibers[here->current].place) == 0) go_on();
}

void look_again() {
    if (++idle > kPatience) fail("a block waits for another one, and none goes on");
    Fiber& fiber = here->fibers[here->current];
    if (chance(8)) change_block();
    if (chance(64)) work_somewhere();  // or it would wait until nobody looks
    if (__builtin_setjmp(fiber.place) == 0) go_on();
}

bool meet(int name, int count, bool any) {
    Barrier& barrier = here->barriers[name];
    if (barrier.arrived && barrier.threads != count) fail("barrier: threads that expect different numbers");
    barrier.threads = count;
    barrier.any |= any;
    ++barrier.arrived;
    const uint64_t generation = barrier.generation;
    barrier.settle(here->live);
    wait_until([&] { return barrier.generation != generation; }, event_of(&barrier, generation));
    return barrier.result;
}

void arrive(int name, int count) {
    Barrier& barrier = here->barriers[name];
    if (barrier.arrived && barrier.threads != count) fail("barrier: threads that expect different numbers");
    barrier.threads = count;
    ++barrier.arrived;
    barrier.settle(here->live);
}

void meet_warp(void* arguments, void (*complete)(const void*, void* const*), const void* context) {
    Warp& warp = here->warps[here->current / kLanes];
    if (warp.arrived && warp.complete != complete) fail("warp: lanes meet at different places");
    warp.arguments[here->current % kLanes] = arguments;
    warp.complete = complete;
    warp.context = context;
    ++warp.arrived;
    const uint64_t generation = warp.generation;
    warp.settle();
    if (warp.generation == generation)
        wait_until([&] { return warp.generation != generation; }, event_of(&warp, generation));
}

void start(std::function<void()> work) {
    Fiber& fiber = here->fibers[here->current];
    fiber.work.push_back(std::move(work));
    if (chance(2)) return;
    do_all(fiber.work);
}

void end_group() {
    here->fibers[here->current].work.emplace_back();
}

void wait_for_groups(int pending) {
    do_groups(here->fibers[here->current].work, pending);
}

void wait_for_all() {
    Fiber& fiber = here->fibers[here->current];
    while (!fiber.work.empty()) do_first(fiber.work);
}

void start_in_warp(std::function<void()> work) {
    auto& queue = here->warps[here->current / kLanes].work;
    queue.push_back(std::move(work));
    if (chance(2)) do_all(queue);
}

void end_group_in_warp() {
    here->warps[here->current / kLanes].work.emplace_back();
}

void wait_for_groups_in_warp(int pending) {
    do_groups(here->warps[here->current / kLanes].work, pending);
}

void arrive_at_cluster() {
    Cluster& cluster = clusters[here->index / cluster_blocks];
    ++cluster.arrived;
    cluster.settle();
}

void wait_for_cluster() {
    const Cluster& cluster = clusters[here->index / cluster_blocks];
    const uint64_t generation = here->fibers[here->current].cluster_phases++;
    wait_until([&] { return cluster.generation > generation; }, event_of(&cluster, generation));
}

char* shared_memory_of(uint32_t rank) {
    const uint32_t index = here->index / cluster_blocks * cluster_blocks + rank;
    for (Block& block : blocks)
        if (block.live > 0 && block.index == index) return block.memory;
    fail("shared memory of a block that does not run");
}

void run_grid(const std::function<void()>& thread, int64_t blocks_of_grid, int count, int64_t bytes,
              int cluster) {
    const std::lock_guard lock(grids);
    for (Block& block : blocks)
        while (int(block.fibers.size()) < count) {
            void* const stack =
                mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (stack == MAP_FAILED) fail("no memory for stacks");
            block.fibers.emplace_back().stack = static_cast<char*>(stack);
            block.waiting.emplace_back();
        }
    threads = count;
    grid = uint32_t(blocks_of_grid);
    begun = 0;
    idle = 0;
    memory_used = bytes;
    kernel = &thread;
    cluster_blocks = cluster;
    if (cluster > kMostInCluster || grid % cluster) fail("clusters: their size");
    clusters.assign(grid / cluster, {0, cluster * count, 0});
    for (int i = 0; i < std::max(kMultiprocessors, cluster); ++i) {
        here = &blocks[i];
        if (begun < grid) begin_block();
    }
    if (_setjmp(end_of_block) && begun < grid) begin_block();
    idle = 0;
    change_block();
    if (here->live > 0) go_on();
}

}  // namespace emulator

// The runtime's functions that the host code calls. The device is a small Hopper, so that small problems
// meet all that large ones do.
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
    const char* const capability = std::getenv("EMULATOR_CAPABILITY");
    const int number = capability ? std::atoi(capability) : 90;
    *value = name == cudaDevAttrComputeCapabilityMajor         ? number / 10
             : name == cudaDevAttrComputeCapabilityMinor       ? number % 10
             : name == cudaDevAttrMultiProcessorCount          ? emulator::kMultiprocessors
             : name == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
             : name == cudaDevAttrL2CacheSize                  ? 1 << 20
                                                               : 0;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = 13000;
    return cudaSuccess;
}
// What the emulated copies understand: see ptx/tma.h.
static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                       const cuuint64_t* extents, const cuuint64_t* strides, const cuuint32_t* box,
                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const int element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
    emulator::TensorMap mine{
        static_cast<const char*>(data), {}, {element_bytes}, {}, swizzle == CU_TENSOR_MAP_SWIZZLE_128B};
    bool fits = rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
                (mine.swizzled || swizzle == CU_TENSOR_MAP_SWIZZLE_NONE);
    for (int i = 0; i < 4; ++i) {
        mine.extents[i] = int64_t(extents[i]);
        mine.box[i] = int(box[i]);
        if (i) mine.strides[i] = int64_t(strides[i - 1]);
        fits = fits && extents[i] > 0 && box[i] > 0 && box[i] <= 256 && (i == 0 || strides[i - 1] % 16 == 0);
    }
    if (!fits || mine.box[0] * element_bytes % 16 || (mine.swizzled && mine.box[0] * element_bytes > 128))
        return CUDA_ERROR_INVALID_VALUE;
    static_assert(sizeof(mine) <= sizeof(*map));
    std::memcpy(map, &mine, sizeof(mine));
    return CUDA_SUCCESS;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = reinterpret_cast<void*>(encode);
    *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "emulated";
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
    std::memset(data, value, bytes);
    return cudaSuccess;
}
}

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
constexpr int kEndOfGroup = 0, kWork = 1;

struct Fiber {
    ucontext_t begin;
    jmp_buf place;
    char* stack;
    bool started, done;
    bool (*ready)(const void*);  // nullptr: yes
    const void* context;
    std::deque<std::function<void()>> work;  // empty functions end groups
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

std::mutex grids;
std::vector<Fiber> fibers;
std::vector<Warp> warps;
Barrier barriers[16];
int threads, live, current;
uint32_t block, grid;
alignas(1024) char memory[kSharedBytes];
int64_t memory_used;
const std::function<void()>* kernel;
jmp_buf end_of_block;
std::mt19937 draw([] {
    const char* const seed = std::getenv("EMULATOR_SEED");
    return seed ? std::atoi(seed) : 0;
}());

bool chance(int of) {
    return draw() % of == 0;
}

bool is_ready(const Fiber& fiber) {
    return !fiber.done && (!fiber.ready || fiber.ready(fiber.context));
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

[[noreturn]] void resume(int index) {
    current = index;
    Fiber& fiber = fibers[index];
    fiber.ready = nullptr;
    if (fiber.started) _longjmp(fiber.place, 1);
    fiber.started = true;
    setcontext(&fiber.begin);
    fail("setcontext");
}

// Mostly the next one, which belongs to the same warp.
int next_ready() {
    while (true) {
        const int first = chance(64) ? int(draw() % threads) : current + 1;
        for (int i = 0; i < threads; ++i)
            if (is_ready(fibers[(first + i) % threads])) return (first + i) % threads;
        // Nobody can go on, unless something that was started ends.
        bool worked = false;
        const int lucky = int(draw() % threads);
        for (int i = 0; i < threads && !worked; ++i) {
            Fiber& fiber = fibers[(lucky + i) % threads];
            if (!has_work(fiber)) continue;
            while (!fiber.work.front()) fiber.work.pop_front();
            do_first(fiber.work);
            worked = true;
        }
        if (!worked) fail("deadlock: every thread waits");
    }
}

void run_thread() {
    (*kernel)();
    Fiber& fiber = fibers[current];
    wait_for_all();
    fiber.done = true;
    --live;
    Warp& warp = warps[current / kLanes];
    --warp.live;
    warp.settle();
    for (Barrier& barrier : barriers) barrier.settle(live);
    if (live == 0) _longjmp(end_of_block, 1);
    resume(next_ready());
}

void run_block() {
    std::memset(memory, 0xff, kSharedBytes);  // NaN
    std::memset(barriers, 0, sizeof(barriers));
    live = threads;
    for (Warp& warp : warps) warp = Warp{};
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = fibers[i];
        ++warps[i / kLanes].live;
        fiber.started = fiber.done = false;
        fiber.ready = nullptr;
        fiber.work.clear();
        getcontext(&fiber.begin);
        fiber.begin.uc_stack = {fiber.stack, 0, kStack};
        makecontext(&fiber.begin, run_thread, 0);
    }
    if (_setjmp(end_of_block) == 0) resume(0);
}

}  // namespace

void fail(const char* why) {
    std::fprintf(stderr, "emulator: %s (block %u, thread %d of %d)\n", why, block, current, threads);
    std::abort();
}

uint32_t thread_index() {
    return current;
}
uint32_t block_index() {
    return block;
}
uint32_t block_threads() {
    return threads;
}
uint32_t grid_blocks() {
    return grid;
}
char* shared_memory() {
    return memory;
}
int64_t shared_bytes() {
    return memory_used;
}

void wait(bool (*ready)(const void*), const void* context) {
    Fiber& fiber = fibers[current];
    fiber.ready = ready;
    fiber.context = context;
    const int next = next_ready();
    if (next == current) {
        fiber.ready = nullptr;
        return;
    }
    if (_setjmp(fiber.place) == 0) resume(next);
}

bool meet(int name, int count, bool any) {
    Barrier& barrier = barriers[name];
    if (barrier.arrived && barrier.threads != count) fail("barrier: threads that expect different numbers");
    barrier.threads = count;
    barrier.any |= any;
    ++barrier.arrived;
    const uint64_t generation = barrier.generation;
    barrier.settle(live);
    wait_until([&] { return barrier.generation != generation; });
    return barrier.result;
}

void arrive(int name, int count) {
    Barrier& barrier = barriers[name];
    if (barrier.arrived && barrier.threads != count) fail("barrier: threads that expect different numbers");
    barrier.threads = count;
    ++barrier.arrived;
    barrier.settle(live);
}

void meet_warp(void* arguments, void (*complete)(const void*, void* const*), const void* context) {
    Warp& warp = warps[current / kLanes];
    if (warp.arrived && warp.complete != complete) fail("warp: lanes meet at different places");
    warp.arguments[current % kLanes] = arguments;
    warp.complete = complete;
    warp.context = context;
    ++warp.arrived;
    const uint64_t generation = warp.generation;
    warp.settle();
    if (warp.generation == generation) wait_until([&] { return warp.generation != generation; });
}

void start(std::function<void()> work) {
    Fiber& fiber = fibers[current];
    fiber.work.push_back(std::move(work));
    if (chance(2)) return;
    do_all(fiber.work);
}

void end_group() {
    fibers[current].work.emplace_back();
}

void wait_for_groups(int pending) {
    do_groups(fibers[current].work, pending);
}

void wait_for_all() {
    Fiber& fiber = fibers[current];
    while (!fiber.work.empty()) do_first(fiber.work);
}

void start_in_warp(std::function<void()> work) {
    auto& queue = warps[current / kLanes].work;
    queue.push_back(std::move(work));
    if (chance(2)) do_all(queue);
}

void end_group_in_warp() {
    warps[current / kLanes].work.emplace_back();
}

void wait_for_groups_in_warp(int pending) {
    do_groups(warps[current / kLanes].work, pending);
}

void run_grid(const std::function<void()>& thread, int64_t blocks, int count, int64_t bytes) {
    const std::lock_guard lock(grids);
    while (int(fibers.size()) < count) {
        void* const stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) fail("no memory for stacks");
        fibers.emplace_back().stack = static_cast<char*>(stack);
    }
    threads = count;
    grid = uint32_t(blocks);
    warps.resize((count + kLanes - 1) / kLanes);
    memory_used = bytes;
    kernel = &thread;
    for (int64_t i = 0; i < blocks; ++i) {
        block = uint32_t(i);
        run_block();
    }
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
             : name == cudaDevAttrMultiProcessorCount          ? 4
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

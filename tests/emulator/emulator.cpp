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
uint32_t block;
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

void do_first(Fiber& fiber) {
    const std::function<void()> work = std::move(fiber.work.front());
    fiber.work.pop_front();
    if (work) work();
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
            do_first(fiber);
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
    for (Warp& warp : warps) warp = Warp{{}, 0, 0, 0, nullptr, nullptr};
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
    for (auto& earlier : fiber.work)
        if (earlier) earlier(), earlier = [] {};
}

void end_group() {
    fibers[current].work.emplace_back();
}

void wait_for_groups(int pending) {
    Fiber& fiber = fibers[current];
    int ends = 0;
    for (const auto& work : fiber.work) ends += !work;
    while (ends > pending) {
        ends -= !fiber.work.front();
        do_first(fiber);
    }
}

void wait_for_all() {
    Fiber& fiber = fibers[current];
    while (!fiber.work.empty()) do_first(fiber);
}

void run_grid(const std::function<void()>& thread, int64_t blocks, int count, int64_t bytes) {
    const std::lock_guard lock(grids);
    while (int(fibers.size()) < count) {
        void* const stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) fail("no memory for stacks");
        fibers.emplace_back().stack = static_cast<char*>(stack);
    }
    threads = count;
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

// The part of CUDA that the kernels use, on the CPU: included in front of every file of csrc/ when build.py
// compiles it with the host's compiler. A block's threads are fibers of one operating-system thread, and so
// are those of the few blocks that run at once, which begin in order. What CUDA leaves open is drawn at
// random (EMULATOR_SEED): which thread of which block goes on at a barrier, and when, between its start and
// the wait for it, an asynchronous copy is done.
//
// It finds wrong addresses, wrong fragments, missing waits, barriers that not all reach, and wrong results.
// It knows nothing of time, memory order, bank conflicts, or bits that depend on how tensor cores truncate.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

namespace emulator {

constexpr int kLanes = 32;
constexpr int kMultiprocessors = 4;  // of the device; each runs one block, or some of a cluster
constexpr int kMostInCluster = 16;

struct Index {
    uint32_t x;
};

// Of the thread that runs.
uint32_t thread_index();
uint32_t block_index();
uint32_t block_threads();
uint32_t grid_blocks();
char* shared_memory();
int64_t shared_bytes();

// The thread goes on when ready(context) is true. Threads that wait for the same event can all go on if one
// can; none is 0.
void wait(bool (*ready)(const void*), const void* context, uint64_t event);

template <class Ready>
void wait_until(const Ready& ready, uint64_t event) {
    wait([](const void* context) { return (*static_cast<const Ready*>(context))(); }, &ready, event);
}

// That `where` leaves a state; states of which threads may wait at once differ in their last 16 bits.
inline uint64_t event_of(const void* where, uint64_t state) {
    return reinterpret_cast<uintptr_t>(where) ^ state << 48;
}

// The thread has looked in vain for what another block writes: others go on first.
void look_again();

// A barrier of the block with a name, at which so many threads meet; 0: all that still run. Returns whether
// any of them said so.
bool meet(int name, int threads, bool any = false);
// Counts the thread in, which goes on.
void arrive(int name, int threads);

// All lanes of the warp meet; then complete(context of a lane, arguments of all, nullptr of lanes that
// ended).
void meet_warp(void* arguments, void (*complete)(const void*, void* const*), const void* context);

template <class Arguments, class Compute>
void with_warp(Arguments& mine, const Compute& compute) {
    meet_warp(
        &mine,
        [](const void* context, void* const* lanes) {
            (*static_cast<const Compute*>(context))(reinterpret_cast<Arguments* const*>(lanes));
        },
        &compute);
}

// What the thread does behind its back, in order: now, when nothing else can go on, or at the latest when it
// waits for all but the latest `pending` groups.
void start(std::function<void()> work);
void end_group();
void wait_for_groups(int pending);
void wait_for_all();

// The same for what a warp does together: its wgmma.
void start_in_warp(std::function<void()> work);
void end_group_in_warp();
void wait_for_groups_in_warp(int pending);

// All threads of the cluster that have not ended arrive, then wait until all have.
void arrive_at_cluster();
void wait_for_cluster();
// Of the cluster's block of that rank.
char* shared_memory_of(uint32_t rank);

// So many blocks are a cluster.
void run_grid(const std::function<void()>& thread, int64_t blocks, int threads, int64_t shared_bytes,
              int cluster);

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes, int cluster,
            const Arguments&... arguments) {
    const std::tuple<Parameters...> given(arguments...);
    run_grid([&] { std::apply(kernel, given); }, blocks, threads, shared_bytes, cluster);
}

[[noreturn]] void fail(const char* why);

// sums (16, columns) += the product of a (depth, 16), transposed, and b (depth, columns), term by term.
// columns: a multiple of 8.
void add_products(double* sums, const double* a, const double* b, int depth, int columns);

// A shared address with so many bytes behind it, at a multiple of so many.
template <class T>
T* at_shared(uint32_t address, int64_t bytes = sizeof(T), int64_t alignment = sizeof(T)) {
    if (address % alignment || address + bytes > shared_bytes()) fail("shared memory: address");
    return reinterpret_cast<T*>(shared_memory() + address);
}

// An mbarrier's 64 bits.
struct Mbarrier {
    int16_t expected, pending;
    uint32_t phase : 1;
    int32_t bytes : 31;

    void arrive(int count = 1) {
        pending -= count;
        settle();
    }
    void expect(int32_t more) { bytes += more; }
    void receive(int32_t some) {
        bytes -= some;
        settle();
    }

  private:
    void settle() {
        if (pending < 0) fail("mbarrier: more arrivals than it was made for");
        if (pending || bytes) return;
        phase ^= 1;
        pending = expected;
    }
};
static_assert(sizeof(Mbarrier) == 8);

// A tensor map: strides in bytes, the innermost one is an element.
struct TensorMap {
    const char* data;
    int64_t extents[4], strides[4];
    int box[4];
    bool swizzled;  // in rows of 128 bytes
};

}  // namespace emulator

#define __device__
#define __global__
#define __host__
#undef __forceinline__
#define __forceinline__ inline
#undef __noinline__
#define __noinline__  // newer standard headers have it between parentheses
#undef __launch_bounds__
#define __launch_bounds__(...)
#define __grid_constant__

#define threadIdx (emulator::Index{emulator::thread_index()})
#define blockIdx (emulator::Index{emulator::block_index()})
#define gridDim (emulator::Index{emulator::grid_blocks()})
#define blockDim (emulator::Index{emulator::block_threads()})

template <class A, class B>
constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
    return b < a ? b : a;
}
template <class A, class B>
constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
    return a < b ? b : a;
}

template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
    return cudaSuccess;
}

inline uint32_t __float_as_uint(float x) {
    return reinterpret_cast<uint32_t&>(x);
}
inline float __uint_as_float(uint32_t x) {
    return reinterpret_cast<float&>(x);
}
inline float __int_as_float(int x) {
    return reinterpret_cast<float&>(x);
}
template <class T>
T __ldg(const T* from) {
    return *from;
}
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b;  // never part of a fused multiply-add
    return product;
}
inline float __fdividef(float a, float b) {
    return a / b;
}
inline void atomicOr(uint32_t* address, uint32_t x) {
    *address |= x;
}
template <class T>
T __ldcs(const T* address) {
    return *address;
}
template <class T>
T __ldcg(const T* address) {
    return *address;
}
template <class T>
void __stcg(T* address, T x) {
    *address = x;
}
inline void __nanosleep(unsigned) {
    emulator::look_again();
}
inline void __threadfence_block() {}
inline void __trap() {
    emulator::fail("trap");
}

inline void __syncthreads() {
    emulator::meet(0, 0);
}
inline int __syncthreads_or(int any) {
    return emulator::meet(0, 0, any);
}
inline void __syncwarp() {
    int nothing = 0;
    emulator::with_warp(nothing, [](int* const*) {});
}
inline int __any_sync(unsigned, int mine) {
    emulator::with_warp(mine, [](int* const* lanes) {
        int any = 0;
        for (int lane = 0; lane < emulator::kLanes; ++lane) any |= lanes[lane] && *lanes[lane];
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane]) *lanes[lane] = any;
    });
    return mine;
}
inline int __popc(unsigned bits) {
    return std::popcount(bits);
}
template <class T, class Combine>
T reduce_sync(T mine, const Combine& combine) {
    emulator::with_warp(mine, [&](T* const* lanes) {
        T all = **std::find_if(lanes, lanes + emulator::kLanes, [](T* lane) { return lane; });
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane]) all = combine(all, *lanes[lane]);
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane]) *lanes[lane] = all;
    });
    return mine;
}
inline unsigned __reduce_or_sync(unsigned, unsigned mine) {
    return reduce_sync(mine, [](unsigned a, unsigned b) { return a | b; });
}
inline int __reduce_min_sync(unsigned, int mine) {
    return reduce_sync(mine, [](int a, int b) { return std::min(a, b); });
}
inline unsigned __ballot_sync(unsigned, int mine) {
    emulator::with_warp(mine, [](int* const* lanes) {
        unsigned votes = 0;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane] && *lanes[lane]) votes |= 1u << lane;
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane]) *lanes[lane] = int(votes);
    });
    return unsigned(mine);
}
template <class T>
T __shfl_sync(unsigned, T mine, int from) {
    struct Exchange {
        T mine, other;
        int from;
    } exchange{mine, mine, from};
    emulator::with_warp(exchange, [](Exchange* const* lanes) {
        for (int lane = 0; lane < emulator::kLanes; ++lane)
            if (lanes[lane] && lanes[lanes[lane]->from]) lanes[lane]->other = lanes[lanes[lane]->from]->mine;
    });
    return exchange.other;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T mine, int step) {
    return __shfl_sync(mask, mine, int(threadIdx.x) % emulator::kLanes ^ step);
}

// What the host knows of a compiled kernel. Each row of kernel_table.py and element type becomes one object
// of these types, defined in a file of its own; the generated registry lists them in the table's order.
#pragma once

#include <cstdint>

#include "../problem.h"

namespace flash::cuda {

struct Device {
    int index;
    int capability;  // 80, 86, 89, 90, 100, 120
    int multiprocessors;
    int64_t shared_bytes_per_block;  // the opt-in limit
    int64_t l2_bytes = 0;            // second-level cache
};

// Blocks of so many bytes that a multiprocessor holds at once. The system takes 1 KiB of each; what a block
// may have at most is the multiprocessor's memory less that (CUDA C++ Programming Guide, technical
// specifications per compute capability).
inline int64_t blocks_in(const Device& device, int64_t shared_bytes) {
    constexpr int64_t system = 1024;
    return (device.shared_bytes_per_block + system) / (shared_bytes + system);
}

struct Launch {
    Device device;
    void* stream;     // cudaStream_t of that device
    void* workspace;  // as many bytes as workspace_bytes() said, 256-byte aligned
    // The kernel may start while the one before it ends: it waits for that itself (ptx/grid_dependency.h).
    // From Hopper on.
    bool overlaps = false;
    int cluster = 1;  // so many blocks are one (ptx/cluster.h)

    Launch overlapping() const { return {device, stream, workspace, device.capability >= 90}; }
};

constexpr int kMostSplits = 128;     // blocks that share the keys of a query tile
constexpr int kMostInCluster = 16;   // that can be a cluster then, on some chips (ptx/cluster.h)
constexpr int kPortableCluster = 8;  // and on all that have clusters

struct ForwardKernel {
    const char* engine;  // "sm80"
    const char* name;    // "forward_bfloat16_d128_q128_k64"
    DType dtype;
    int head_dim, value_dim;  // at most, of queries and keys, and of values
    int query_tile, key_tile;
    int from_keys;  // for queries that see so many keys or more (plan.cpp)
    int blocks;     // that a multiprocessor can hold at once, if it has the shared memory
    bool takes_bias;
    int64_t shared_bytes;  // of one block
    // splits > 1: that many blocks share the keys of a query tile, and combine adds them up.
    int64_t (*workspace_bytes)(const ForwardProblem& problem, int splits, const Device& device);
    void (*launch)(const ForwardProblem& problem, int splits, const Launch& launch);
    int capability = 0;  // of the only chips that run it; 0: all
    // Why it doesn't take a problem whose type and sizes suit it, or nullptr; nullptr: it takes all.
    const char* (*why_not)(const ForwardProblem& problem, const Device& device) = nullptr;
    int few = 0;  // for few queries, which have so many rows each (few_queries.h); 0: for all
};

struct BackwardKernel {
    const char* engine;
    const char* name;
    DType dtype;
    int head_dim, value_dim;
    int query_tile, key_tile;
    int from_keys;
    int blocks;
    int64_t shared_bytes;
    int64_t (*workspace_bytes)(const BackwardProblem& problem, const Device& device);
    void (*launch)(const BackwardProblem& problem, const Launch& launch);
    int capability = 0;  // both as of a ForwardKernel
    const char* (*why_not)(const BackwardProblem& problem, const Device& device) = nullptr;
};

using MaskPacker = void(const MaskPacking& packing, const Launch& launch);

struct Architecture {
    int capability;
    bool ptx;  // also as text that the driver compiles for later chips
};

// The generated registry (setup.py): null-terminated, in the table's order, best first; empty without nvcc.
extern const ForwardKernel* const forward_kernels[];
extern const BackwardKernel* const backward_kernels[];
extern MaskPacker* const mask_packer;       // nullptr without nvcc
extern const Architecture architectures[];  // that every kernel was compiled for; the last has capability 0
extern const char* const toolkit;           // version of the compiler, "13.0"

}  // namespace flash::cuda

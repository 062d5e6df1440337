// Which kernel a problem goes to on a GPU: the first row of the table that takes it. Pure: it looks at the
// problem and the device's abilities alone, so it is tested without a GPU.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace flash::cuda {

// nullptr if no kernel takes the problem.
const ForwardKernel* kernel_for(const ForwardProblem& problem, const Device& device);
const BackwardKernel* kernel_for(const BackwardProblem& problem, const Device& device);

// How many blocks share the keys of a query tile.
int splits_of(const ForwardProblem& problem, const ForwardKernel& kernel, const Device& device);
// The same for a grid of so many blocks, each of which visits so many key tiles. resident: blocks that a
// multiprocessor runs at once.
int splits_for(int64_t blocks, int64_t key_tiles, int multiprocessors, int resident);
// The same for few queries, all blocks at once. pages: the keys lie in pages. cluster: so many can be one.
int splits_for_few(int64_t blocks, int64_t key_tiles, int multiprocessors, int resident, bool pages,
                   int cluster);

struct WhyNot {
    std::string engine;
    std::string kernel;  // empty: the whole engine
    std::string reason;
};

// Every kernel but the chosen one, in the table's order; one line for an engine without the dtype.
std::vector<WhyNot> why_not(const ForwardProblem& problem, const Device& device);
std::vector<WhyNot> why_not(const BackwardProblem& problem, const Device& device);
// Why no kernel at all runs on the device; empty if some do.
std::string why_not(const Device& device);

std::vector<const char*> engine_names();  // that have kernels in this build
std::string architecture_list();          // "8.0, 9.0, 12.0+PTX": what the kernels were compiled for
const char* name_of(DType dtype);

}  // namespace flash::cuda

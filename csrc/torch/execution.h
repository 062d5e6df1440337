// Running a problem on the engine that its tensors' device has: what an engine needs besides the problem
// comes from torch, which is threads and scratch memory on the CPU, stream and workspace on a GPU.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../problem.h"

namespace flash {

// q: a tensor of the problem. Throws std::runtime_error if no engine takes it.
void execute(const ForwardProblem& problem, const torch::stable::Tensor& q);
void execute(const BackwardProblem& problem, const torch::stable::Tensor& q);
void execute(const MaskPacking& packing, const torch::stable::Tensor& mask);

}  // namespace flash

// Running a problem on the engine that its tensors' device has: what an engine needs besides the problem
// comes from torch, which is threads and scratch memory on the CPU, stream and workspace on a GPU.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../problem.h"

namespace flash {

// BackwardProblem::delta is scratch memory, too. It lies as lse does.
inline int64_t delta_bytes(const ForwardProblem& problem) {
    return (problem.cu_seqlens_q ? 1 : problem.batch) * problem.heads_q * problem.rows_q *
           (problem.dtype == DType::float64 ? sizeof(double) : sizeof(float));
}

inline void set_delta(BackwardProblem& problem, void* data) {
    problem.delta = problem.forward.lse;
    problem.delta.data = data;
}

// q: a tensor of the problem. Throws std::runtime_error if no engine takes it. The backward's delta is set
// here.
void execute(const ForwardProblem& problem, const torch::stable::Tensor& q);
void execute(BackwardProblem problem, const torch::stable::Tensor& q);
void execute(const MaskPacking& packing, const torch::stable::Tensor& mask);

}  // namespace flash

// csrc/torch/execution.cpp for emulated GPUs: tensors on the CPU go to the GPU engines.
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "../engine.h"
#include "../torch/execution.h"

namespace flash {
namespace {

template <class Problem>
void run_emulated(const Problem& problem) {
    const cuda::Device& device = cuda::devices().found.at(0);
    const Plan plan = choose(problem, device);
    std::vector<char> workspace(plan.workspace_bytes + 256, char(0xff));
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    run(plan, problem, {device, nullptr, reinterpret_cast<void*>((address + 255) / 256 * 256)});
}

}  // namespace

void execute(const ForwardProblem& problem, const torch::stable::Tensor&) {
    run_emulated(problem);
}
void execute(BackwardProblem problem, const torch::stable::Tensor&) {
    std::vector<char> delta(delta_bytes(problem.forward), char(0xff));
    set_delta(problem, delta.data());
    run_emulated(problem);
}
void execute(const MaskPacking& packing, const torch::stable::Tensor&) {
    cuda::mask_packer(packing, {cuda::devices().found.at(0), nullptr, nullptr});
}

}  // namespace flash

// The engines that this binary holds, which of them the machine can run, and which one a problem goes to.
// Pure: it looks at the problem and the machine's abilities, never at tensors, so it is tested without a GPU.
#pragma once

#include <string>
#include <vector>

#include "cpu/parallel.h"
#include "cuda/device.h"
#include "cuda/plan.h"
#include "problem.h"

namespace flash {

struct EngineReport {
    std::string name;           // "cpu", "sm80"
    std::string configuration;  // "avx512_bf16": the instruction set; "cuda 8.0, 9.0": the architectures
    bool usable;
    bool chosen;          // runs here unless FLASH_ATTN_CPU_ISA names another
    std::string why_not;  // empty if usable
};

// One line per engine and configuration compiled in, best first: the CPU's, then the GPU's.
std::vector<EngineReport> engines();

struct Plan {
    const char* engine;         // "cpu", "sm80"
    const char* configuration;  // the instruction set, or the kernel's name
    int64_t workspace_bytes;    // on the CPU of each thread
    int splits = 1;             // blocks that share the keys of a query tile
    // Of a GPU engine, the one of the problem's pass.
    const cuda::ForwardKernel* forward_kernel = nullptr;
    const cuda::BackwardKernel* backward_kernel = nullptr;
};

// The problem that engines are given: of one query a head the heads that share keys become rows of one tile,
// so that keys are read once for all of them. Others stay as they are.
ForwardProblem folded(const ForwardProblem& problem);

// For tensors on the CPU.
Plan choose(const ForwardProblem& problem);
Plan choose(const BackwardProblem& problem);
void run(const Plan& plan, const ForwardProblem& problem, const cpu::Threads& threads);
void run(const Plan& plan, const BackwardProblem& problem, const cpu::Threads& threads);

// For tensors on a GPU. Throws std::runtime_error, with each kernel's reason, if no engine takes the problem.
Plan choose(const ForwardProblem& problem, const cuda::Device& device);
Plan choose(const BackwardProblem& problem, const cuda::Device& device);
void run(const Plan& plan, const ForwardProblem& problem, const cuda::Launch& launch);
void run(const Plan& plan, const BackwardProblem& problem, const cuda::Launch& launch);

}  // namespace flash

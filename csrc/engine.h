// The engines that this binary holds, which of them the machine can run, and which one a problem goes to.
// Pure: it looks at the problem and the machine's abilities, never at tensors, so it is tested without a GPU.
#pragma once

#include <string>
#include <vector>

#include "cpu/parallel.h"
#include "problem.h"

namespace flash {

struct EngineReport {
    std::string name;           // "cpu"
    std::string configuration;  // "avx512_bf16": the instruction set
    bool usable;
    bool chosen;          // runs here unless FLASH_ATTN_CPU_ISA names another
    std::string why_not;  // empty if usable
};

// One line per engine and configuration compiled in, best first.
std::vector<EngineReport> engines();

struct Plan {
    std::string engine;
    std::string configuration;
    size_t scratch_bytes;  // per thread
};

// Throws std::runtime_error if no engine takes the problem.
Plan choose(const ForwardProblem& problem);
Plan choose(const BackwardProblem& problem);

void run(const Plan& plan, const ForwardProblem& problem, const cpu::Threads& threads);
void run(const Plan& plan, const BackwardProblem& problem, const cpu::Threads& threads);

}  // namespace flash

#include "engine.h"

#include <cstdlib>
#include <stdexcept>

#include "cpu/variant.h"

namespace flash {
namespace cpu {

#if defined(__x86_64__)
FLASH_DECLARE_CPU_VARIANT(avx512_bf16)
FLASH_DECLARE_CPU_VARIANT(avx512)
FLASH_DECLARE_CPU_VARIANT(avx2)
#endif
FLASH_DECLARE_CPU_VARIANT(baseline)

namespace {

bool supports_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool supports_avx512() {
#if defined(__x86_64__)
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

bool supports_avx512_bf16() {
#if defined(__x86_64__)
    return supports_avx512() && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

struct Candidate {
    Variant variant;
    bool usable;
};

#define FLASH_CPU_VARIANT(isa, usable) \
    {{#isa, isa::forward_scratch_bytes, isa::backward_scratch_bytes, isa::forward, isa::backward}, usable}

const std::vector<Candidate>& candidates() {
    static const std::vector<Candidate> all = {
#if defined(__x86_64__)
        FLASH_CPU_VARIANT(avx512_bf16, supports_avx512_bf16()),
        FLASH_CPU_VARIANT(avx512, supports_avx512()),
        FLASH_CPU_VARIANT(avx2, supports_avx2()),
#endif
        FLASH_CPU_VARIANT(baseline, true),
    };
    return all;
}

// The best variant, or the one that FLASH_ATTN_CPU_ISA names: how the tests reach all of them on one machine.
const Variant& variant() {
    static const Variant& chosen = []() -> const Variant& {
        const char* wanted = std::getenv("FLASH_ATTN_CPU_ISA");
        for (const Candidate& candidate : candidates())
            if (candidate.usable && (!wanted || std::string(wanted) == candidate.variant.isa)) return candidate.variant;
        throw std::runtime_error(std::string("FLASH_ATTN_CPU_ISA is ") + wanted +
                                 ", which this build doesn't have or this machine can't run; python -m flash_attn "
                                 "lists the usable ones");
    }();
    return chosen;
}

}  // namespace
}  // namespace cpu

std::vector<EngineReport> engines() {
    std::vector<EngineReport> reports;
    for (const cpu::Candidate& candidate : cpu::candidates())
        reports.push_back({"cpu", candidate.variant.isa, candidate.usable,
                           candidate.usable ? "" : "this machine lacks its instructions"});
    return reports;
}

Plan choose(const ForwardProblem& problem) {
    return {"cpu", cpu::variant().isa, cpu::variant().forward_scratch_bytes(problem)};
}

Plan choose(const BackwardProblem& problem) {
    return {"cpu", cpu::variant().isa, cpu::variant().backward_scratch_bytes(problem)};
}

void run(const Plan&, const ForwardProblem& problem, const cpu::Threads& threads) {
    cpu::variant().forward(problem, threads);
}

void run(const Plan&, const BackwardProblem& problem, const cpu::Threads& threads) {
    cpu::variant().backward(problem, threads);
}

}  // namespace flash

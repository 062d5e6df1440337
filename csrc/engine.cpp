#include "engine.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <stdexcept>

#include "cpu/variant.h"

namespace flash {
namespace cpu {

#if defined(__x86_64__)
FLASH_DECLARE_CPU_VARIANT(amx)
FLASH_DECLARE_CPU_VARIANT(avx512_bf16)
FLASH_DECLARE_CPU_VARIANT(avx512)
FLASH_DECLARE_CPU_VARIANT(avx2)
#endif
FLASH_DECLARE_CPU_VARIANT(baseline)

namespace {

#if defined(__x86_64__)

bool supports_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool supports_avx512() {
    return supports_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool supports_avx512_bf16() {
    return supports_avx512() && __builtin_cpu_supports("avx512bf16");
}

// Without the matrix unit Intel's chips multiply pairs of bfloat16 at a third of their float rate, AMD's at
// twice it (benchmarks/NOTES.md).
bool multiplies_pairs_fast() {
    return supports_avx512_bf16() && __builtin_cpu_is("amd");
}

// The matrix unit's registers must be asked for, once a process (Documentation/arch/x86/xstate.rst in Linux).
bool supports_amx() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!supports_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool tiles = d >> 24 & 1, bfloat16 = d >> 22 & 1;
    return tiles && bfloat16 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#endif

enum class Use { best, slower, never };

struct Candidate {
    Variant variant;
    Use use;
};

#define FLASH_CPU_VARIANT(isa, use) \
    {{#isa, isa::forward_scratch_bytes, isa::backward_scratch_bytes, isa::forward, isa::backward}, use}

Use use_if(bool supported) {
    return supported ? Use::best : Use::never;
}

const std::vector<Candidate>& candidates() {
    static const std::vector<Candidate> all = {
#if defined(__x86_64__)
        FLASH_CPU_VARIANT(amx, use_if(supports_amx())),
        FLASH_CPU_VARIANT(avx512_bf16, multiplies_pairs_fast()  ? Use::best
                                       : supports_avx512_bf16() ? Use::slower
                                                                : Use::never),
        FLASH_CPU_VARIANT(avx512, use_if(supports_avx512())),
        FLASH_CPU_VARIANT(avx2, use_if(supports_avx2())),
#endif
        FLASH_CPU_VARIANT(baseline, Use::best),
    };
    return all;
}

// The best variant, or the one that FLASH_ATTN_CPU_ISA names: how the tests reach all of them on one machine.
const Variant& variant() {
    static const Variant* const chosen = [] {
        const char* wanted = std::getenv("FLASH_ATTN_CPU_ISA");
        for (const Candidate& candidate : candidates())
            if (wanted ? std::string(wanted) == candidate.variant.isa && candidate.use != Use::never
                       : candidate.use == Use::best)
                return &candidate.variant;
        std::string usable;
        for (const Candidate& candidate : candidates())
            if (candidate.use != Use::never) usable += std::string(" ") + candidate.variant.isa;
        throw std::runtime_error(std::string("flash_attn: FLASH_ATTN_CPU_ISA is ") + wanted +
                                 "; usable on this machine:" + usable);
    }();
    return *chosen;
}

}  // namespace
}  // namespace cpu

namespace {

// Device 0 stands for all of them: machines with unlike GPUs ask explain().
std::string why_no_gpu() {
    const cuda::Devices& devices = cuda::devices();
    return devices.found.empty() ? devices.why_none : cuda::why_not(devices.found.front());
}

template <class Problem>
[[noreturn]] void refuse(const Problem& problem, const cuda::Device& device) {
    std::string message = "flash_attn: no GPU engine takes these tensors";
    for (const cuda::WhyNot& other : cuda::why_not(problem, device))
        message +=
            "; " + other.engine + (other.kernel.empty() ? "" : " ") + other.kernel + ": " + other.reason;
    throw std::runtime_error(message);
}

}  // namespace

std::vector<EngineReport> engines() {
    std::vector<EngineReport> reports;
    for (const cpu::Candidate& candidate : cpu::candidates())
        reports.push_back({"cpu", candidate.variant.isa, candidate.use != cpu::Use::never,
                           &candidate.variant == &cpu::variant(),
                           candidate.use == cpu::Use::never ? "this machine lacks its instructions" : ""});
    const std::vector<const char*> names = cuda::engine_names();
    const std::string why_not = names.empty() ? "" : why_no_gpu();
    for (const char* name : names)
        reports.push_back(
            {name, "cuda " + cuda::architecture_list(), why_not.empty(), why_not.empty(), why_not});
    return reports;
}

ForwardProblem folded(const ForwardProblem& problem) {
    const int64_t group = problem.heads_k > 0 ? problem.heads_q / problem.heads_k : 1;
    const bool heads_differ = problem.alibi_slopes || problem.dropout_threshold || problem.bias.data ||
                              problem.visible.data || problem.key_blocks.counts;
    // One query sees all keys before it, wherever a diagonal is.
    const bool sees_all = problem.seqlen_q == 1 && !problem.cu_seqlens_q && problem.window_left < 0;
    if (!sees_all || group <= 1 || heads_differ) return problem;
    ForwardProblem rows = problem;
    rows.heads_q = problem.heads_k;
    rows.seqlen_q = rows.rows_q = group;
    rows.window_right = -1;
    for (TensorView* view : {&rows.q, &rows.out}) {
        view->row_stride = view->head_stride;
        view->head_stride *= group;
    }
    rows.lse.head_stride *= group;
    return rows;
}

Plan choose(const ForwardProblem& problem) {
    return {"cpu", cpu::variant().isa, int64_t(cpu::variant().forward_scratch_bytes(problem))};
}

Plan choose(const BackwardProblem& problem) {
    return {"cpu", cpu::variant().isa, int64_t(cpu::variant().backward_scratch_bytes(problem))};
}

void run(const Plan&, const ForwardProblem& problem, const cpu::Threads& threads) {
    cpu::variant().forward(problem, threads);
}

void run(const Plan&, const BackwardProblem& problem, const cpu::Threads& threads) {
    cpu::variant().backward(problem, threads);
}

Plan choose(const ForwardProblem& problem, const cuda::Device& device) {
    const cuda::ForwardKernel* const kernel = cuda::kernel_for(problem, device);
    if (!kernel) refuse(problem, device);
    const int splits = cuda::splits_of(problem, *kernel, device);
    return {kernel->engine, kernel->name, kernel->workspace_bytes(problem, splits, device),
            splits,         kernel,       nullptr};
}

Plan choose(const BackwardProblem& problem, const cuda::Device& device) {
    const cuda::BackwardKernel* const kernel = cuda::kernel_for(problem, device);
    if (!kernel) refuse(problem, device);
    return {kernel->engine, kernel->name, kernel->workspace_bytes(problem, device), 1, nullptr, kernel};
}

void run(const Plan& plan, const ForwardProblem& problem, const cuda::Launch& launch) {
    plan.forward_kernel->launch(problem, plan.splits, launch);
}

void run(const Plan& plan, const BackwardProblem& problem, const cuda::Launch& launch) {
    plan.backward_kernel->launch(problem, launch);
}

}  // namespace flash

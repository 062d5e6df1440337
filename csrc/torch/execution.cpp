#include "execution.h"

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <optional>
#include <type_traits>

#include "../attention/score_matrix.h"
#include "../engine.h"
#include "checks.h"
#include "empty.h"

namespace flash {
namespace {

// Scratch memory from torch's allocator and torch's own threads.
class CpuThreads {
  public:
    CpuThreads(const Tensor& like, size_t scratch_bytes) {
        threads_.count = torch::stable::get_num_threads();
        threads_.scratch_bytes = scratch_bytes;
        scratch_ = new_empty(like, {int64_t(scratch_bytes) * threads_.count + 64}, ScalarType::Byte);
        const auto address = reinterpret_cast<uintptr_t>(scratch_.data_ptr());
        threads_.scratch = reinterpret_cast<char*>((address + 63) / 64 * 64);
        threads_.parallel_for = [](int64_t begin, int64_t end, int64_t grain, cpu::Threads::Body body,
                                   void* context) {
            torch::stable::parallel_for(begin, end, grain,
                                        [&](int64_t first, int64_t last) { body(first, last, context); });
        };
    }
    const cpu::Threads& threads() const { return threads_; }

  private:
    Tensor scratch_;
    cpu::Threads threads_;
};

// torch's one symbol that a torch without CUDA lacks: looked up where the CUDA library is loaded already, and
// never linked.
void* current_stream(int device) {
    using Lookup = AOTITorchError (*)(int32_t device, void** stream);
    static const auto lookup = [] {
        void* const library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
        void* const symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
        return reinterpret_cast<Lookup>(symbol);
    }();
    check(lookup, "this torch has no CUDA streams (libtorch_cuda.so is not loaded); q must be on the CPU");
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(lookup(device, &stream));
    return stream;
}

const cuda::Device& device_of(const Tensor& q) {
    const cuda::Devices& devices = cuda::devices();
    check(!devices.found.empty(), "q is on ", DeviceOf{q}, ", but ", devices.why_none,
          " (python -m flash_attn lists engines); move q, k and v to the CPU");
    return devices.found.at(q.get_device_index());
}

template <class Problem>
void execute_on_cpu(const Problem& problem, const Tensor& q) {
    const Plan plan = choose(problem);
    run(plan, problem, CpuThreads(q, plan.workspace_bytes).threads());
}

template <class Problem>
void execute_on_gpu(Problem problem, const Tensor& q) {
    const cuda::Device& device = device_of(q);
    const Plan plan = choose(problem, device);
    // The engine's own copy of CUDA's runtime launches on the context that is current in the driver.
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    // Freed on return, and yet ours until the kernels are done: the allocator reuses it in stream order.
    std::optional<Tensor> workspace;
    int64_t bytes = plan.workspace_bytes;
    constexpr bool backward = std::is_same_v<Problem, BackwardProblem>;
    // One allocation for both, a microsecond less.
    const int64_t delta = (bytes + 255) / 256 * 256;
    if constexpr (backward) bytes = delta + delta_bytes(problem.forward);
    if (bytes) workspace = new_empty(q, {bytes}, ScalarType::Byte);
    if constexpr (backward) set_delta(problem, static_cast<char*>(workspace->data_ptr()) + delta);
    run(plan, problem, {device, current_stream(device.index), workspace ? workspace->data_ptr() : nullptr});
}

}  // namespace

void execute(const ForwardProblem& problem, const Tensor& q) {
    if (q.is_cpu()) return execute_on_cpu(problem, q);
    execute_on_gpu(problem, q);
}

void execute(BackwardProblem problem, const Tensor& q) {
    if (!q.is_cpu()) return execute_on_gpu(problem, q);
    const Tensor delta = new_empty(q, {delta_bytes(problem.forward)}, ScalarType::Byte);
    set_delta(problem, delta.data_ptr());
    execute_on_cpu(problem, q);
}

void execute(const MaskPacking& packing, const Tensor& mask) {
    if (mask.is_cpu()) {
        for (int64_t index = 0; index < words_of(packing); ++index) pack_word(packing, index);
        for (int64_t index = 0; index < MaskList::count_of(packing); ++index) {
            const MaskList list(packing, index);
            int32_t count = 0;
            for (int64_t column = 0; column < list.capacity(); ++column)
                if (const int32_t block = list.block(column); block >= 0) list.indices()[count++] = block;
            list.count() = count;
        }
        return;
    }
    const cuda::Device& device = device_of(mask);
    const torch::stable::accelerator::DeviceGuard guard(device.index);
    check(cuda::mask_packer, "this build has no GPU engine");
    cuda::mask_packer(packing, {device, current_stream(device.index), nullptr});
}

}  // namespace flash

#include "../cpu/probabilities.h"

#include "checks.h"
#include "empty.h"
#include "operators.h"

namespace flash {
namespace {

Tensor on_cpu(const Tensor& tensor) {
    return torch::stable::to(tensor, torch::stable::Device(torch::headeronly::DeviceType::CPU));
}

OptionalTensor on_cpu(const OptionalTensor& tensor) {
    return tensor ? OptionalTensor(on_cpu(*tensor)) : tensor;
}

}  // namespace

Tensor attention_probabilities(Tensor q, Tensor k, Tensor v, FLASH_OPTION_PARAMETERS) {
    const ScalarType dtype = q.scalar_type();
    Arguments(q, k, v, FLASH_OPTION_ARGUMENTS);  // what the user gave, checked as given
    if (!q.is_cpu()) {
        const Tensor result = attention_probabilities(
            on_cpu(q), on_cpu(k), on_cpu(v), on_cpu(cu_seqlens_q), on_cpu(cu_seqlens_k), max_seqlen_q,
            max_seqlen_k, on_cpu(alibi_slopes), on_cpu(rng_state), on_cpu(key_block_counts),
            on_cpu(key_block_indices), on_cpu(query_block_counts), on_cpu(query_block_indices), block_size_q,
            block_size_k, dropout_p, softmax_scale, window_size_left, window_size_right, softcap,
            deterministic, on_cpu(attn_bias), on_cpu(attn_mask));
        return torch::stable::to(result, q.device());
    }
    q = torch::stable::to(q, ScalarType::Double);
    k = torch::stable::to(k, ScalarType::Double);
    v = torch::stable::to(v, ScalarType::Double);
    if (attn_bias) attn_bias = torch::stable::to(*attn_bias, ScalarType::Double);
    const Arguments arguments(q, k, v, FLASH_OPTION_ARGUMENTS);
    const ForwardProblem& problem = arguments.problem;
    const auto rounded = [](int64_t length) { return (length + 127) / 128 * 128; };
    const int64_t rows = rounded(arguments.packed() ? max_seqlen_q : problem.seqlen_q);
    const int64_t columns = rounded(arguments.packed() ? max_seqlen_k : problem.seqlen_k);
    Tensor result = new_empty(q, {problem.batch, problem.heads_q, rows, columns}, ScalarType::Double);
    result = torch::stable::zero_(result);
    cpu::probabilities(problem, static_cast<double*>(result.mutable_data_ptr()), rows, columns);
    return torch::stable::to(result, dtype);
}

}  // namespace flash

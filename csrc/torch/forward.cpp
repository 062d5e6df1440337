#include "../engine.h"
#include "checks.h"
#include "execution.h"
#include "operators.h"

namespace flash {

namespace {

std::tuple<Tensor, Tensor> run_forward(Arguments& arguments, const Tensor& q) {
    ForwardProblem& problem = arguments.problem;
    Tensor out = arguments.new_rows_like(q, problem.head_dim_v);
    Tensor lse = arguments.new_statistics();
    problem.out = arguments.view(out);
    problem.lse = arguments.statistics_of(lse);
    execute(folded(problem), q);
    return {out, lse};
}

}  // namespace

std::tuple<Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, FLASH_OPTION_PARAMETERS) {
    Arguments arguments(q, k, v, FLASH_OPTION_ARGUMENTS);
    return run_forward(arguments, q);
}

std::tuple<Tensor, Tensor> plain_attention_forward(Tensor q, Tensor k, Tensor v, double softmax_scale,
                                                   int64_t window_size_left, int64_t window_size_right,
                                                   bool deterministic) {
    Arguments arguments(q, k, v,
                        Options::plain(softmax_scale, window_size_left, window_size_right, deterministic));
    return run_forward(arguments, q);
}

std::tuple<Tensor, Tensor> attention_cached(Tensor q, Tensor k, Tensor v, OptionalTensor cu_seqlens_q,
                                            int64_t max_seqlen_q, OptionalTensor cache_seqlens,
                                            OptionalTensor cache_leftpad, OptionalTensor cache_batch_idx,
                                            OptionalTensor block_table, OptionalTensor alibi_slopes,
                                            double softmax_scale, int64_t window_size_left,
                                            int64_t window_size_right, double softcap, int64_t num_splits) {
    Options options = Options::plain(softmax_scale, window_size_left, window_size_right, false);
    options.cu_seqlens_q = cu_seqlens_q;
    options.max_seqlen_q = max_seqlen_q;
    options.alibi_slopes = alibi_slopes;
    options.softcap = softcap;
    const CacheOptions cache{cache_seqlens, cache_leftpad, cache_batch_idx, block_table};
    Arguments arguments(q, k, v, options, &cache);
    check(num_splits >= 0 && num_splits <= cuda::kMostSplits, "num_splits is ", num_splits,
          "; it must be from 0 to ", cuda::kMostSplits);
    arguments.problem.splits = num_splits;
    return run_forward(arguments, q);
}

}  // namespace flash

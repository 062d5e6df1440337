#include "checks.h"
#include "empty.h"
#include "execution.h"
#include "operators.h"

namespace flash {
namespace {

void check_statistics(const char* name, const Tensor& tensor, const Tensor& q, const Arguments& arguments) {
    const ForwardProblem& problem = arguments.problem;
    check_device(name, tensor, q);
    check_dtype(name, tensor, arguments.accumulation_dtype(), "");
    if (arguments.packed())
        check_shape(name, tensor, {problem.heads_q, problem.rows_q});
    else
        check_shape(name, tensor, {problem.batch, problem.heads_q, problem.rows_q});
}

// dbias: filled if given.
std::tuple<Tensor, Tensor, Tensor> run_backward(Tensor dout, OptionalTensor dlse, Tensor q, Tensor k,
                                                Tensor v, Tensor out, Tensor lse, const Options& options,
                                                Tensor* dbias = nullptr) {
    Arguments arguments(q, k, v, options);
    BackwardProblem problem{};
    for (const auto& [name, tensor] : {std::pair{"dout", &dout}, {"out", &out}}) {
        check_device(name, *tensor, q);
        check_dtype(name, *tensor, q.scalar_type(), " as q is");
        if (arguments.packed())
            check_shape(name, *tensor, {q.size(0), q.size(1), v.size(2)});
        else
            check_shape(name, *tensor, {q.size(0), q.size(1), q.size(2), v.size(3)});
    }
    check_statistics("lse", lse, q, arguments);
    lse = torch::stable::contiguous(lse);
    if (dlse) {
        check_statistics("dlse", *dlse, q, arguments);
        dlse = torch::stable::contiguous(*dlse);
        problem.dlse = arguments.statistics_of(*dlse);
    }
    arguments.problem.out = arguments.view(out);
    arguments.problem.lse = arguments.statistics_of(lse);
    problem.forward = arguments.problem;
    problem.dout = arguments.view(dout);
    Tensor dq = arguments.new_rows_like(q, problem.forward.head_dim);
    Tensor dk = arguments.new_rows_like(k, problem.forward.head_dim);
    Tensor dv = arguments.new_rows_like(v, problem.forward.head_dim_v);
    if (problem.forward.rows_q == 0 || problem.forward.rows_k == 0) {
        for (Tensor* gradient : {&dq, &dk, &dv}) torch::stable::zero_(*gradient);
        return {dq, dk, dv};
    }
    problem.dq = arguments.view(dq);
    problem.dk = arguments.view(dk);
    problem.dv = arguments.view(dv);
    if (dbias) problem.dbias = score_matrix_of(*dbias);
    execute(problem, q);
    return {dq, dk, dv};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor dout, OptionalTensor dlse, Tensor q, Tensor k,
                                                      Tensor v, Tensor out, Tensor lse,
                                                      FLASH_OPTION_PARAMETERS) {
    return run_backward(dout, dlse, q, k, v, out, lse, FLASH_OPTION_ARGUMENTS);
}

std::tuple<Tensor, Tensor, Tensor> plain_attention_backward(Tensor dout, OptionalTensor dlse, Tensor q,
                                                            Tensor k, Tensor v, Tensor out, Tensor lse,
                                                            double softmax_scale, int64_t window_size_left,
                                                            int64_t window_size_right, bool deterministic) {
    return run_backward(dout, dlse, q, k, v, out, lse,
                        Options::plain(softmax_scale, window_size_left, window_size_right, deterministic));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward_with_bias(Tensor dout, OptionalTensor dlse,
                                                                        Tensor q, Tensor k, Tensor v,
                                                                        Tensor out, Tensor lse,
                                                                        FLASH_OPTION_PARAMETERS) {
    check(attn_bias.has_value(), "attn_bias is missing, whose gradient is wanted");
    const std::vector<int64_t> sizes(attn_bias->sizes().begin(), attn_bias->sizes().end());
    Tensor dbias =
        new_empty(q, sizes, q.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float);
    torch::stable::zero_(dbias);
    const auto [dq, dk, dv] = run_backward(dout, dlse, q, k, v, out, lse, FLASH_OPTION_ARGUMENTS, &dbias);
    return {dq, dk, dv, dbias};
}

}  // namespace flash

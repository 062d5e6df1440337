#include "execution.h"
#include "operators.h"

namespace flash {

std::tuple<Tensor, Tensor> attention_forward(Tensor q, Tensor k, Tensor v, FLASH_OPTION_PARAMETERS) {
    Arguments arguments(q, k, v, FLASH_OPTION_ARGUMENTS);
    ForwardProblem& problem = arguments.problem;
    Tensor out = arguments.new_rows_like(q, problem.head_dim_v);
    Tensor lse = arguments.new_statistics();
    problem.out = arguments.view(out);
    problem.lse = arguments.statistics_of(lse);
    execute(problem, q);
    return {out, lse};
}

}  // namespace flash

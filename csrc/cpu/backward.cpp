// Backward pass on the CPU (docs/algorithm.md, Algorithm 2): P is recomputed from q, k and lse, tile by tile.
//
// Two independent walks, seven products instead of five: one over key tiles for dK and dV, one over query
// tiles for dQ. The recomputation buys what one walk can't have: no dQ is shared between tasks, so there is
// no accumulator of dQ's size, no atomic addition and no order that could differ; every gradient is bitwise
// repeatable, and a single head still feeds all threads.
#include "key_gradient.h"
#include "query_gradient.h"
#include "variant.h"

namespace flash::cpu::FLASH_CPU_ISA {
namespace {

// delta = rowsum(dO o O) - dlse, the part of dS that a row shares (docs/algorithm.md, Eq. 4).
template <class Element>
void prepare(const BackwardProblem& problem, const Threads& threads) {
    using Real = RealOf<Element>;
    const ForwardProblem& forward = problem.forward;
    for_each_query_tile(forward, threads,
                        [&](char*, int64_t batch, int64_t head, const Sequence& sequence, Interval queries) {
                            for (int64_t query = queries.begin; query < queries.end; ++query) {
                                const int64_t row = sequence.first_query_row + query;
                                const Element* out = row_of<Element>(forward.out, batch, row, head);
                                const Element* dout = row_of<Element>(problem.dout, batch, row, head);
                                Real sum[kLanes<Real>] = {};  // one chain of additions a lane
                                for (int64_t d = 0; d < forward.head_dim_v; ++d)
                                    sum[d % kLanes<Real>] += to_real(out[d]) * to_real(dout[d]);
                                Real delta = problem.dlse.data
                                                 ? -*statistics_of<Real>(problem.dlse, batch, row, head)
                                                 : Real(0);
                                for (const Real part : sum) delta += part;
                                *statistics_of<Real>(problem.delta, batch, row, head) = delta;
                            }
                        });
}

}  // namespace

size_t backward_scratch_bytes(const BackwardProblem& problem) {
    const auto bytes = [&]<class Element>(Element*) {
        Carver of_queries(nullptr), of_keys(nullptr);
        QueryGradientTask<Element>(problem, of_queries);
        KeyGradientTask<Element>(problem, of_keys);
        return of_queries.used() > of_keys.used() ? of_queries.used() : of_keys.used();
    };
    FLASH_DISPATCH_ELEMENT(problem.forward.dtype, bytes);
}

void backward(const BackwardProblem& problem, const Threads& threads) {
    const auto run = [&]<class Element>(Element*) {
        prepare<Element>(problem, threads);
        for_each_key_tile(problem.forward, threads, [&](char* scratch, auto... tile) {
            Carver carver(scratch);
            const MatrixUnit unit;
            KeyGradientTask<Element>(problem, carver).run(tile...);
        });
        const auto query_gradient = [&](char* scratch, auto... tile) {
            Carver carver(scratch);
            const MatrixUnit unit;
            QueryGradientTask<Element>(problem, carver).run(tile...);
        };
        if (problem.dbias.data)
            for_each_query_tile_of(problem.dbias, problem.forward, threads, query_gradient);
        else
            for_each_query_tile(problem.forward, threads, query_gradient);
        const ForwardProblem& forward = problem.forward;
        zero_unowned_rows<Element>(problem.dq, forward.cu_seqlens_q, forward.batch, forward.rows_q,
                                   forward.heads_q, forward.head_dim);
        zero_unowned_rows<Element>(problem.dk, forward.cu_seqlens_k, forward.batch, forward.rows_k,
                                   forward.heads_k, forward.head_dim);
        zero_unowned_rows<Element>(problem.dv, forward.cu_seqlens_k, forward.batch, forward.rows_k,
                                   forward.heads_k, forward.head_dim_v);
    };
    FLASH_DISPATCH_ELEMENT(problem.forward.dtype, run);
}

}  // namespace flash::cpu::FLASH_CPU_ISA

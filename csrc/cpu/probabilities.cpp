#include "probabilities.h"

#include <cmath>
#include <limits>
#include <vector>

#include "../attention/dropout.h"
#include "../attention/scalar_math.h"
#include "../attention/score.h"
#include "../attention/score_matrix.h"
#include "../attention/tile_schedule.h"

namespace flash::cpu {
namespace {

constexpr double kInvisible = -std::numeric_limits<double>::infinity();

// One query's scores, kInvisible where its schedule does not lead.
std::vector<double> scores_of(const ForwardProblem& problem, const Sequence& sequence, int64_t batch,
                              int64_t head, int64_t query) {
    const Mask mask(problem, sequence);
    const ScoreTransform<ScalarMath<double>> transform(problem, batch, head);
    const Interval keys = mask.keys_of(query);
    TileSchedule schedule =
        problem.key_blocks.counts
            ? TileSchedule(keys, keys, 1, block_list_of(problem.key_blocks, batch, head, query))
            : TileSchedule(keys, keys, 1);
    const double* row = row_of<double>(problem.q, batch, sequence.first_query_row + query, head);
    std::vector<double> scores(size_t(sequence.seqlen_k), kInvisible);
    for (Run run; schedule.next(run);)
        for (int64_t key = run.begin; key < run.end; ++key) {
            const double* column = row_of<double>(problem.k, batch, sequence.first_key_row + key,
                                                  head / (problem.heads_q / problem.heads_k));
            double dot = 0;
            for (int64_t d = 0; d < problem.head_dim; ++d) dot += row[d] * column[d];
            double score = transform.score(dot, std::fabs(double(query + mask.diagonal() - key)));
            if (problem.bias.data) {
                const double bias = row_of<const double>(problem.bias, batch, head, query)[key];
                score = bias == kInvisible ? kInvisible : score + bias;
            }
            if (problem.visible.data &&
                !is_visible(row_of<const uint32_t>(problem.visible, batch, head, query), Position(key)))
                score = kInvisible;
            scores[size_t(key)] = score;
        }
    return scores;
}

}  // namespace

void probabilities(const ForwardProblem& problem, double* probabilities, int64_t rows, int64_t columns) {
    for (int64_t batch = 0; batch < problem.batch; ++batch) {
        const Sequence sequence = sequence_of(problem, batch);
        for (int64_t head = 0; head < problem.heads_q; ++head)
            for (int64_t query = 0; query < sequence.seqlen_q; ++query) {
                const std::vector<double> scores = scores_of(problem, sequence, batch, head, query);
                double row_max = kInvisible;
                for (const double score : scores) row_max = score > row_max ? score : row_max;
                double* row = probabilities + ((batch * problem.heads_q + head) * rows + query) * columns;
                for (int64_t key = 0; key < sequence.seqlen_k; ++key) {
                    if (scores[size_t(key)] == kInvisible) continue;
                    const bool kept =
                        !problem.dropout_threshold || Dropout(problem, batch, head).keep(query, key);
                    row[key] = std::exp(scores[size_t(key)] - row_max) * (kept ? 1 : -1);
                }
            }
    }
}

}  // namespace flash::cpu

// Forward pass on the CPU (docs/algorithm.md, Algorithm 1). A task is one tile of queries of one head; it
// walks the tile's schedule over the keys.
//
// Queries are the lanes of all vectors: a panel is kPanel queries, its scores are S^T [keys][kPanel] and its
// output is O^T [Dv][kPanel]. So the running maximum and sum are vectors and need no reduction across lanes,
// K and V are read as they lie, and P^T leaves the softmax in the order that the second product reads. K and
// V tiles are loaded once for all panels of the task; S^T never leaves the first-level cache.
//
// Invariant: a panel's result depends on its own queries, on the grid of key tiles and on nothing else;
// neither the batch, nor the threads, nor the schedule's runs change a bit of it.
#include "../attention/online_softmax.h"
#include "../attention/score.h"
#include "../attention/tile_schedule.h"
#include "addend_tile.h"
#include "dropout_tile.h"
#include "operand_tile.h"
#include "score_walk.h"
#include "stacked_tile.h"
#include "variant.h"

namespace flash::cpu::FLASH_CPU_ISA {
namespace {

template <class Element>
class ForwardTask {
    using Operand = OperandOf<Element>;
    using Real = RealOf<Element>;
    using Math = VectorMath<Real>;
    using KeyTiles = ScheduledTiles<kKeyTile>;
    static constexpr int64_t kPanel = Panel<Real>::lanes;
    static constexpr int64_t kPanels = kQueryTile / kPanel;
    static constexpr int64_t kStep = GemmTraits<Operand>::depth_per_step;

  public:
    ForwardTask(const ForwardProblem& problem, Carver& carver)
        : problem_(problem),
          depth_(operand_depth<Operand>(problem.head_dim)),
          value_rows_(round_up<int64_t>(problem.head_dim_v, kLanes<Real>)),
          values_(problem.head_dim_v, carver) {
        rows_ = carver.take<Operand>(kPanel * depth_);
        keys_ = carver.take<Operand>((kKeyTile + kMicroRows) * depth_);
        scores_ = carver.take<Real>((kKeyTile + kMicroRows) * kPanel);
        keep_ = carver.take<Real>(problem.dropout_threshold ? kKeyTile * kPanel : 0);
        addends_ = carver.take<Real>(has_score_matrices(problem) ? kKeyTile * kPanel : 0);
        out_rows_ = carver.take<Real>(kPanel * value_rows_);
        for (int64_t panel = 0; panel < kPanels; ++panel) {
            queries_[panel] = carver.take<Operand>(depth_ * kPanel);
            out_[panel] = carver.take<Real>((value_rows_ + kMicroRows) * kPanel);
        }
    }

    void run(int64_t batch, int64_t head, const Sequence& sequence, Interval queries) {
        batch_ = batch;
        head_ = head;
        sequence_ = sequence;
        const Mask mask(problem_, sequence);
        const ScoreTransform<Math> transform(problem_, batch, head);
        const int64_t panels = (queries.end - queries.begin + kPanel - 1) / kPanel;
        for (int64_t panel = 0; panel < panels; ++panel) start(panel, mask, queries);

        KeyTiles tiles(mask.keys_of(queries.begin), mask.keys_of(queries.end - 1), problem_.key_blocks, batch,
                       head, queries.begin);
        for (typename KeyTiles::Tile tile; tiles.next(tile);) {
            load_keys(tile.positions, tile.masked || tile.partial || problem_.bias.data);
            for (int64_t panel = 0; panel < panels; ++panel) attend(panel, tile, transform);
        }
        for (int64_t panel = 0; panel < panels; ++panel) finish(panel);
    }

  private:
    void start(int64_t index, const Mask& mask, Interval queries) {
        panels_[index] = query_panel<Real>(mask, queries.begin + index * kPanel, queries.end);
        const Panel<Real>& panel = panels_[index];
        const Element* from =
            row_of<Element>(problem_.q, batch_, sequence_.first_query_row + panel.first(), head_);
        load_plain(rows_, depth_, from, problem_.q.row_stride, panel.count(), kPanel, problem_.head_dim);
        transpose(queries_[index], kPanel, rows_, depth_, kPanel, depth_);
        std::memset(out_[index], 0, size_t(value_rows_ + kMicroRows) * kPanel * sizeof(Real));
        for (auto& softmax : softmax_[index]) softmax = OnlineSoftmax<Math>();
    }

    void load_keys(Interval keys, bool masked) {
        const int64_t head = head_ / (problem_.heads_q / problem_.heads_k), count = keys.end - keys.begin;
        const int64_t row = sequence_.first_key_row + keys.begin;
        const int64_t entry = sequence_.key_entry;
        load_plain(keys_, depth_, row_of<Element>(problem_.k, entry, row, head), problem_.k.row_stride, count,
                   count, problem_.head_dim);
        values_.load(row_of<Element>(problem_.v, entry, row, head), problem_.v.row_stride, count, masked);
    }

    void attend(int64_t index, const typename KeyTiles::Tile& tile, const ScoreTransform<Math>& transform) {
        const Panel<Real>& panel = panels_[index];
        PanelSpan span = panel.template span<kStep>(tile.positions);
        has_addends_ = problem_.bias.data;
        if (tile.partial && problem_.visible.data && span.count > 0)
            has_addends_ |=
                keep_shown<kStep>(span, tile.positions, problem_, batch_, head_, panel.positions());
        const int64_t first_key = tile.positions.begin + span.offset;
        if (span.count <= 0) return;
        span.masked |= has_addends_;
        if (has_addends_)
            fill_addend_tile<Element>(addends_, problem_, batch_, head_, panel.positions(), 1,
                                      {first_key, first_key + span.count}, kPanel);
        // S^T = K Q^T
        gemm<Order::row_major>(span.count, kPanel, depth_, keys_ + span.offset * depth_, depth_,
                               queries_[index], kPanel, scores_, kPanel, Result::overwrite);
        if (problem_.dropout_threshold)
            fill_dropout_tile(keep_, Dropout(problem_, batch_, head_), panel.positions(), 1,
                              {first_key, first_key + span.count}, kPanel);
        softmax(index, first_key, span, transform);
        // O^T += V^T P^T
        values_.add_product(out_[index], span, reinterpret_cast<const Operand*>(scores_));
    }

    // Scores to probabilities, in place: P^T takes the first half of S^T's memory where two of them make a
    // Pair.
    void softmax(int64_t index, int64_t first_key, const PanelSpan& span,
                 const ScoreTransform<Math>& transform) {
        const Panel<Real>& panel = panels_[index];
        for (int v = 0; v < kMicroVectors; ++v) {
            OnlineSoftmax<Math>& softmax = softmax_[index][v];
            Real* scores = scores_ + v * kLanes<Real>;
            Vector<Real> tile_max = softmax.minus_infinity();
            for (int64_t key = 0; key < span.count; ++key) {
                Vector<Real> score = load<Vector<Real>>(scores + key * kPanel);
                if (transform.is_linear()) {
                    score = score * transform.inner;
                } else {
                    score = transform.score(score, panel.distance(v, first_key + key));
                }
                LaneMask<Real> seen = ~LaneMask<Real>{};
                if (has_addends_) {
                    const auto addend = load<Vector<Real>>(addends_ + v * kLanes<Real> + key * kPanel);
                    seen = addend != softmax.minus_infinity();
                    score += addend;
                }
                if (span.masked)
                    score = panel.sees(v, first_key + key) & seen ? score : softmax.minus_infinity();
                tile_max = score > tile_max ? score : tile_max;
                store(scores + key * kPanel, score);
            }
            const Vector<Real> rescale = softmax.update(tile_max);
            rescale_out(index, v, rescale);
            exponentiate(softmax, scores, v, span.count);
        }
    }

    void rescale_out(int64_t index, int v, Vector<Real> rescale) {
        bool unchanged = true;
        for (int lane = 0; lane < kLanes<Real>; ++lane) unchanged &= rescale[lane] == 1;
        if (unchanged) return;
        Real* out = out_[index] + v * kLanes<Real>;
        for (int64_t d = 0; d < problem_.head_dim_v; ++d)
            store(out + d * kPanel, load<Vector<Real>>(out + d * kPanel) * rescale);
    }

    void exponentiate(OnlineSoftmax<Math>& softmax, const Real* scores, int v, int64_t count) {
        const Vector<Real> reference = softmax.reference();
        Vector<Real> sum{};
        Operand* probabilities = reinterpret_cast<Operand*>(scores_) + v * kLanes<Real>;
        const Real* keep = keep_ + v * kLanes<Real>;
        for (int64_t key = 0; key < count; key += kStep) {
            Vector<Real> step[kStep];
            for (int64_t i = 0; i < kStep; ++i) {
                if (key + i >= count) {
                    step[i] = Vector<Real>{};
                    continue;
                }
                step[i] = Math::exponential(load<Vector<Real>>(scores + (key + i) * kPanel) - reference);
                sum += step[i];
                if (problem_.dropout_threshold) step[i] *= load<Vector<Real>>(keep + (key + i) * kPanel);
            }
            store_step(probabilities + key / kStep * kPanel, step);
        }
        softmax.add(sum);
    }

    void finish(int64_t index) {
        const Panel<Real>& panel = panels_[index];
        Real lse[kPanel];
        for (int v = 0; v < kMicroVectors; ++v) {
            const Vector<Real> normalizer = softmax_[index][v].normalizer();
            Real* out = out_[index] + v * kLanes<Real>;
            for (int64_t d = 0; d < value_rows_; ++d)
                store(out + d * kPanel, load<Vector<Real>>(out + d * kPanel) * normalizer);
            store(lse + v * kLanes<Real>, softmax_[index][v].log_sum_exp());
        }
        transpose(out_rows_, value_rows_, out_[index], kPanel, value_rows_, kPanel);
        const int64_t row = sequence_.first_query_row + panel.first();
        store_rows(row_of<Element>(problem_.out, batch_, row, head_), problem_.out.row_stride, out_rows_,
                   value_rows_, panel.count(), problem_.head_dim_v);
        std::memcpy(statistics_of<Real>(problem_.lse, batch_, row, head_), lse,
                    size_t(panel.count()) * sizeof(Real));
    }

    const ForwardProblem& problem_;
    const int64_t depth_;          // operands along D
    const int64_t value_rows_;     // Dv in whole vectors
    bool has_addends_ = false;     // the panel's part of the tile, or hidden scores
    StackedTile<Operand> values_;  // [kKeyTile][Dv]
    int64_t batch_, head_;
    Sequence sequence_;
    Operand* rows_;              // [kPanel][depth]
    Operand* keys_;              // [kKeyTile][depth]
    Real* scores_;               // [kKeyTile][kPanel]: S^T, then P^T as operands
    Real* keep_;                 // [kKeyTile][kPanel]
    Real* addends_;              // [kKeyTile][kPanel]
    Real* out_rows_;             // [kPanel][value_rows]
    Operand* queries_[kPanels];  // [depth][kPanel]
    Real* out_[kPanels];         // [value_rows][kPanel]: O^T, not yet normalised
    Panel<Real> panels_[kPanels];
    OnlineSoftmax<Math> softmax_[kPanels][kMicroVectors];
};

}  // namespace

size_t forward_scratch_bytes(const ForwardProblem& problem) {
    const auto bytes = [&]<class Element>(Element*) {
        Carver carver(nullptr);
        ForwardTask<Element>(problem, carver);
        return carver.used();
    };
    FLASH_DISPATCH_ELEMENT(problem.dtype, bytes);
}

void forward(const ForwardProblem& problem, const Threads& threads) {
    const auto run = [&]<class Element>(Element*) {
        for_each_query_tile(problem, threads, [&](char* scratch, auto... tile) {
            Carver carver(scratch);
            const MatrixUnit unit;
            ForwardTask<Element>(problem, carver).run(tile...);
        });
        zero_unowned_rows<Element>(problem.out, problem.cu_seqlens_q, problem.batch, problem.rows_q,
                                   problem.heads_q, problem.head_dim_v);
        if (problem.cu_seqlens_q)
            for (int64_t head = 0; head < problem.heads_q; ++head)
                for (int64_t row = problem.cu_seqlens_q[problem.batch]; row < problem.rows_q; ++row)
                    *statistics_of<RealOf<Element>>(problem.lse, 0, row, head) =
                        -std::numeric_limits<RealOf<Element>>::infinity();
    };
    FLASH_DISPATCH_ELEMENT(problem.dtype, run);
}

}  // namespace flash::cpu::FLASH_CPU_ISA

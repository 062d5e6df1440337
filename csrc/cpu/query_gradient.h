// dQ of one tile of queries of one head: walks the keys as the forward does, with queries as lanes.
//
//     S^T = K Q^T,  dP^T = V dO^T,  dQ^T += K^T dS^T
//
// A bias' gradient is added up on the way, by whoever is given all heads and batch entries that share it.
#pragma once

#include "addend_tile.h"
#include "dropout_tile.h"
#include "operand_tile.h"
#include "score_gradient.h"
#include "score_walk.h"
#include "stacked_tile.h"

namespace flash::cpu::FLASH_CPU_ISA {

template <class Element>
class QueryGradientTask {
    using Operand = OperandOf<Element>;
    using Real = RealOf<Element>;
    using KeyTiles = ScheduledTiles<kKeyTile>;
    static constexpr int64_t kPanel = Panel<Real>::lanes;
    static constexpr int64_t kPanels = kQueryTile / kPanel;
    static constexpr int64_t kStep = GemmTraits<Operand>::depth_per_step;

  public:
    QueryGradientTask(const BackwardProblem& problem, Carver& carver)
        : problem_(problem.forward),
          backward_(problem),
          depth_(operand_depth<Operand>(problem_.head_dim)),
          value_depth_(operand_depth<Operand>(problem_.head_dim_v)),
          rows_of_dq_(round_up<int64_t>(problem_.head_dim, kLanes<Real>)),
          keys_(carver.take<Operand>((kKeyTile + kMicroRows) * depth_)),
          stacked_keys_(problem_.head_dim, carver, keys_) {
        rows_ = carver.take<Operand>(kPanel * (depth_ > value_depth_ ? depth_ : value_depth_));
        values_ = carver.take<Operand>((kKeyTile + kMicroRows) * value_depth_);
        dots_ = carver.take<Real>((kKeyTile + kMicroRows) * kPanel);
        gradients_ = carver.take<Real>((kKeyTile + kMicroRows) * kPanel);
        keep_ = carver.take<Real>(problem_.dropout_threshold ? kKeyTile * kPanel : 0);
        addends_ = carver.take<Real>(has_score_matrices(problem_) ? kKeyTile * kPanel : 0);
        bias_gradient_ = carver.take<Real>(problem.dbias.data ? kKeyTile * kPanel : 0);
        dq_rows_ = carver.take<Real>(kPanel * rows_of_dq_);
        for (int64_t panel = 0; panel < kPanels; ++panel) {
            queries_[panel] = carver.take<Operand>(depth_ * kPanel);
            dout_[panel] = carver.take<Operand>(value_depth_ * kPanel);
            dq_[panel] = carver.take<Real>((rows_of_dq_ + kMicroRows) * kPanel);
            statistics_[panel] = {carver.take<Real>(kPanel), carver.take<Real>(kPanel)};
        }
    }

    void run(int64_t batch, int64_t head, const Sequence& sequence, Interval queries) {
        batch_ = batch;
        head_ = head;
        sequence_ = sequence;
        const Mask mask(problem_, sequence);
        const ScoreTransform<VectorMath<Real>> transform(problem_, batch, head);
        const int64_t panels = (queries.end - queries.begin + kPanel - 1) / kPanel;
        for (int64_t panel = 0; panel < panels; ++panel) start(panel, mask, queries);

        KeyTiles tiles(mask.keys_of(queries.begin), mask.keys_of(queries.end - 1), problem_.key_blocks, batch,
                       head, queries.begin);
        for (typename KeyTiles::Tile tile; tiles.next(tile);) {
            load_keys(tile.positions, tile.masked || problem_.bias.data || tile.partial);
            for (int64_t panel = 0; panel < panels; ++panel) accumulate(panel, tile, transform);
        }
        for (int64_t panel = 0; panel < panels; ++panel) finish(panel);
    }

  private:
    void start(int64_t index, const Mask& mask, Interval queries) {
        panels_[index] = query_panel<Real>(mask, queries.begin + index * kPanel, queries.end);
        const int64_t count = panels_[index].count(),
                      row = sequence_.first_query_row + panels_[index].first();
        load_plain(rows_, depth_, row_of<Element>(problem_.q, batch_, row, head_), problem_.q.row_stride,
                   count, kPanel, problem_.head_dim);
        transpose(queries_[index], kPanel, rows_, depth_, kPanel, depth_);
        load_plain(rows_, value_depth_, row_of<Element>(backward_.dout, batch_, row, head_),
                   backward_.dout.row_stride, count, kPanel, problem_.head_dim_v);
        transpose(dout_[index], kPanel, rows_, value_depth_, kPanel, value_depth_);
        std::memset(statistics_[index].lse, 0, kPanel * sizeof(Real));
        std::memset(statistics_[index].delta, 0, kPanel * sizeof(Real));
        statistics_[index].load(backward_, batch_, row, head_, count);
        std::memset(dq_[index], 0, size_t(rows_of_dq_ + kMicroRows) * kPanel * sizeof(Real));
    }

    void load_keys(Interval keys, bool masked) {
        const int64_t head = head_ / (problem_.heads_q / problem_.heads_k), count = keys.end - keys.begin;
        const int64_t row = sequence_.first_key_row + keys.begin;
        const Element* from = row_of<Element>(problem_.k, batch_, row, head);
        load_plain(keys_, depth_, from, problem_.k.row_stride, count, count, problem_.head_dim);
        stacked_keys_.load(from, problem_.k.row_stride, count, masked);
        load_plain(values_, value_depth_, row_of<Element>(problem_.v, batch_, row, head),
                   problem_.v.row_stride, count, count, problem_.head_dim_v);
    }

    void accumulate(int64_t index, const typename KeyTiles::Tile& tile,
                    const ScoreTransform<VectorMath<Real>>& transform) {
        const Panel<Real>& panel = panels_[index];
        PanelSpan span = panel.template span<kStep>(tile.positions);
        const bool hides = tile.partial && keep_listed<kStep>(span, tile, panel.positions());
        if (span.count <= 0) return;
        const bool has_addends = problem_.bias.data || hides;
        span.masked |= has_addends;
        const int64_t first_key = tile.positions.begin + span.offset;
        const Interval keys{first_key, first_key + span.count};
        gemm<Order::row_major>(span.count, kPanel, depth_, keys_ + span.offset * depth_, depth_,
                               queries_[index], kPanel, dots_, kPanel, Result::overwrite);
        gemm<Order::row_major>(span.count, kPanel, value_depth_, values_ + span.offset * value_depth_,
                               value_depth_, dout_[index], kPanel, gradients_, kPanel, Result::overwrite);
        const bool dropout = problem_.dropout_threshold;
        if (dropout)
            fill_dropout_tile(keep_, Dropout(problem_, batch_, head_), panel.positions(), 1, keys, kPanel);
        if (has_addends)
            fill_addend_tile<Element>(addends_, problem_, batch_, head_, panel.positions(), 1, keys, kPanel);
        Real* const bias_gradient = backward_.dbias.data ? bias_gradient_ : nullptr;
        differentiate<Lanes::queries, Operand>({dots_, gradients_, dropout ? keep_ : nullptr,
                                                has_addends ? addends_ : nullptr, bias_gradient, first_key},
                                               panel, span, transform, statistics_[index]);
        if (bias_gradient) add_bias_gradient(panel.positions(), keys);
        stacked_keys_.add_product(dq_[index], span, reinterpret_cast<const Operand*>(gradients_));
    }

    void add_bias_gradient(Interval queries, Interval keys) const {
        for (int64_t query = queries.begin; query < queries.end; ++query) {
            Real* sum = row_of<Real>(backward_.dbias, batch_, head_, query) + keys.begin;
            const Real* lane = bias_gradient_ + (query - queries.begin);
            for (int64_t i = 0; i < keys.end - keys.begin; ++i) sum[i] += lane[i * kPanel];
        }
    }

    void finish(int64_t index) {
        const Panel<Real>& panel = panels_[index];
        transpose(dq_rows_, rows_of_dq_, dq_[index], kPanel, rows_of_dq_, kPanel);
        const int64_t row = sequence_.first_query_row + panel.first();
        store_rows(row_of<Element>(backward_.dq, batch_, row, head_), backward_.dq.row_stride, dq_rows_,
                   rows_of_dq_, panel.count(), problem_.head_dim);
    }

    const ForwardProblem& problem_;
    const BackwardProblem& backward_;
    const int64_t depth_, value_depth_;  // operands along D and Dv
    const int64_t rows_of_dq_;           // D in whole vectors; without Pairs it equals depth
    Operand* const keys_;                // [kKeyTile][depth]
    StackedTile<Operand> stacked_keys_;  // the same rows
    int64_t batch_, head_;
    Sequence sequence_;
    Operand* rows_;              // [kPanel][depth or value_depth]
    Operand* values_;            // [kKeyTile][value_depth]
    Real* dots_;                 // [kKeyTile][kPanel]: S^T, then P^T
    Real* gradients_;            // [kKeyTile][kPanel]: dP^T, then dS^T
    Real* keep_;                 // [kKeyTile][kPanel]
    Real* addends_;              // [kKeyTile][kPanel]
    Real* bias_gradient_;        // [kKeyTile][kPanel]: of this panel and head
    Real* dq_rows_;              // [kPanel][rows_of_dq]
    Operand* queries_[kPanels];  // [depth][kPanel]
    Operand* dout_[kPanels];     // [value_depth][kPanel]
    Real* dq_[kPanels];          // [rows_of_dq][kPanel]: dQ^T
    SoftmaxStatistics<Real> statistics_[kPanels];
    Panel<Real> panels_[kPanels];
};

}  // namespace flash::cpu::FLASH_CPU_ISA

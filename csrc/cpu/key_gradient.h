// dK and dV of one tile of keys of one key head: walks the transposed schedule over the queries of every
// query head of the group, with keys as lanes, so that grouped heads need no copies of their own.
//
//     S = Q K^T,  dP = dO V^T,  dV += P^T dO,  dK += dS^T Q
#pragma once

#include "addend_tile.h"
#include "dropout_tile.h"
#include "operand_tile.h"
#include "score_gradient.h"
#include "score_walk.h"

namespace flash::cpu::FLASH_CPU_ISA {

template <class Element>
class KeyGradientTask {
    using Operand = OperandOf<Element>;
    using Real = RealOf<Element>;
    using QueryTiles = ScheduledTiles<kQueryTile>;
    static constexpr int64_t kPanel = Panel<Real>::lanes;
    static constexpr int64_t kPanels = kKeyTile / kPanel;
    static constexpr int64_t kStep = GemmTraits<Operand>::depth_per_step;

  public:
    KeyGradientTask(const BackwardProblem& problem, Carver& carver)
        : problem_(problem.forward),
          backward_(problem),
          depth_(operand_depth<Operand>(problem_.head_dim)),
          value_depth_(operand_depth<Operand>(problem_.head_dim_v)),
          columns_(round_up<int64_t>(problem_.head_dim, kMicroColumns<Real>)),
          value_columns_(round_up<int64_t>(problem_.head_dim_v, kMicroColumns<Real>)),
          ld_(kStep == 1 ? columns_ : depth_),
          value_ld_(kStep == 1 ? value_columns_ : value_depth_) {
        rows_ = carver.take<Operand>(kPanel * (depth_ > value_depth_ ? depth_ : value_depth_));
        queries_ = carver.take<Operand>((kQueryTile + kMicroRows) * ld_);
        dout_ = carver.take<Operand>((kQueryTile + kMicroRows) * value_ld_);
        stacked_queries_ = kStep == 1 ? queries_ : carver.take<Operand>(kQueryTile / kStep * columns_);
        stacked_dout_ = kStep == 1 ? dout_ : carver.take<Operand>(kQueryTile / kStep * value_columns_);
        dots_ = carver.take<Real>((kQueryTile + kMicroRows) * kPanel);
        gradients_ = carver.take<Real>((kQueryTile + kMicroRows) * kPanel);
        keep_ = carver.take<Real>(problem_.dropout_threshold ? kQueryTile * kPanel : 0);
        addends_ = carver.take<Real>(has_score_matrices(problem_) ? kQueryTile * kPanel : 0);
        statistics_ = {carver.take<Real>(kQueryTile), carver.take<Real>(kQueryTile)};
        for (int64_t panel = 0; panel < kPanels; ++panel) {
            keys_[panel] = carver.take<Operand>(depth_ * kPanel);
            values_[panel] = carver.take<Operand>(value_depth_ * kPanel);
            dk_[panel] = carver.take<Real>((kPanel + kMicroRows) * columns_);
            dv_[panel] = carver.take<Real>((kPanel + kMicroRows) * value_columns_);
        }
    }

    void run(int64_t batch, int64_t key_head, const Sequence& sequence, Interval keys) {
        batch_ = batch;
        key_head_ = key_head;
        sequence_ = sequence;
        const Mask mask(problem_, sequence);
        const int64_t panels = (keys.end - keys.begin + kPanel - 1) / kPanel;
        for (int64_t panel = 0; panel < panels; ++panel) start(panel, mask, keys);

        const int64_t group = problem_.heads_q / problem_.heads_k;
        for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
            const ScoreTransform<VectorMath<Real>> transform(problem_, batch, head);
            QueryTiles tiles(mask.queries_of(keys.begin), mask.queries_of(keys.end - 1),
                             problem_.query_blocks, batch, head, keys.begin);
            for (typename QueryTiles::Tile tile; tiles.next(tile);) {
                load_queries(head, tile.positions, tile.masked || problem_.bias.data || tile.partial);
                for (int64_t panel = 0; panel < panels; ++panel) accumulate(panel, head, tile, transform);
            }
        }
        for (int64_t panel = 0; panel < panels; ++panel) finish(panel);
    }

  private:
    void start(int64_t index, const Mask& mask, Interval keys) {
        panels_[index] = key_panel<Real>(mask, keys.begin + index * kPanel, keys.end);
        const int64_t count = panels_[index].count(), row = sequence_.first_key_row + panels_[index].first();
        load_plain(rows_, depth_, row_of<Element>(problem_.k, batch_, row, key_head_), problem_.k.row_stride,
                   count, kPanel, problem_.head_dim);
        transpose(keys_[index], kPanel, rows_, depth_, kPanel, depth_);
        load_plain(rows_, value_depth_, row_of<Element>(problem_.v, batch_, row, key_head_),
                   problem_.v.row_stride, count, kPanel, problem_.head_dim_v);
        transpose(values_[index], kPanel, rows_, value_depth_, kPanel, value_depth_);
        std::memset(dk_[index], 0, size_t((kPanel + kMicroRows) * columns_) * sizeof(Real));
        std::memset(dv_[index], 0, size_t((kPanel + kMicroRows) * value_columns_) * sizeof(Real));
    }

    void load_queries(int64_t head, Interval queries, bool masked) {
        const int64_t count = queries.end - queries.begin, row = sequence_.first_query_row + queries.begin;
        const Element* q = row_of<Element>(problem_.q, batch_, row, head);
        const Element* dout = row_of<Element>(backward_.dout, batch_, row, head);
        load_plain(queries_, ld_, q, problem_.q.row_stride, count, count, problem_.head_dim);
        load_plain(dout_, value_ld_, dout, backward_.dout.row_stride, count, count, problem_.head_dim_v);
        if constexpr (kStep > 1) {
            load_stacked(stacked_queries_, q, problem_.q.row_stride, count, problem_.head_dim, columns_);
            load_stacked(stacked_dout_, dout, backward_.dout.row_stride, count, problem_.head_dim_v,
                         value_columns_);
        }
        statistics_.load(backward_, batch_, row, head, count);
        finite_ = !masked || (all_finite(queries_, count * ld_) && all_finite(dout_, count * value_ld_));
    }

    void accumulate(int64_t index, int64_t head, const typename QueryTiles::Tile& tile,
                    const ScoreTransform<VectorMath<Real>>& transform) {
        const Panel<Real>& panel = panels_[index];
        PanelSpan span = panel.template span<kStep>(tile.positions);
        const bool hides = tile.partial && keep_listed<kStep>(span, tile, panel.positions());
        if (span.count <= 0) return;
        const bool has_addends = problem_.bias.data || hides;
        span.masked |= has_addends;
        const int64_t first_query = tile.positions.begin + span.offset;
        const Interval queries{first_query, first_query + span.count};
        gemm<Order::row_major>(span.count, kPanel, depth_, queries_ + span.offset * ld_, ld_, keys_[index],
                               kPanel, dots_, kPanel, Result::overwrite);
        gemm<Order::row_major>(span.count, kPanel, value_depth_, dout_ + span.offset * value_ld_, value_ld_,
                               values_[index], kPanel, gradients_, kPanel, Result::overwrite);
        const bool dropout = problem_.dropout_threshold;
        if (dropout)
            fill_dropout_tile(keep_, Dropout(problem_, batch_, head), queries, kPanel, panel.positions(), 1);
        if (has_addends)
            fill_addend_tile<Element>(addends_, problem_, batch_, head, queries, kPanel, panel.positions(),
                                      1);
        differentiate<Lanes::keys, Operand>({dots_, gradients_, dropout ? keep_ : nullptr,
                                             has_addends ? addends_ : nullptr, nullptr, first_query},
                                            panel, span, transform,
                                            {statistics_.lse + span.offset, statistics_.delta + span.offset});
        const bool selecting = span.masked && !finite_;
        const int64_t skipped = span.offset / kStep, steps = (span.count + kStep - 1) / kStep;
        add_product(dv_[index], value_columns_, dots_, stacked_dout_ + skipped * value_columns_, steps,
                    selecting);
        add_product(dk_[index], columns_, gradients_, stacked_queries_ + skipped * columns_, steps,
                    selecting);
    }

    // sum[kPanel][columns] += tile^T rows
    static void add_product(Real* sum, int64_t columns, const Real* tile, const Operand* rows, int64_t steps,
                            bool selecting) {
        const Operand* operands = reinterpret_cast<const Operand*>(tile);
        if (selecting)
            selecting_gemm<Probabilities::in_a>(kPanel, columns, steps, operands, kPanel, rows, columns, sum,
                                                columns);
        else
            gemm<Order::column_major>(kPanel, columns, steps, operands, kPanel, rows, columns, sum, columns,
                                      Result::accumulate);
    }

    void finish(int64_t index) {
        const int64_t count = panels_[index].count(), row = sequence_.first_key_row + panels_[index].first();
        store_rows(row_of<Element>(backward_.dk, batch_, row, key_head_), backward_.dk.row_stride, dk_[index],
                   columns_, count, problem_.head_dim);
        store_rows(row_of<Element>(backward_.dv, batch_, row, key_head_), backward_.dv.row_stride, dv_[index],
                   value_columns_, count, problem_.head_dim_v);
    }

    const ForwardProblem& problem_;
    const BackwardProblem& backward_;
    const int64_t depth_, value_depth_;      // operands along D and Dv
    const int64_t columns_, value_columns_;  // D and Dv in whole strips of columns
    const int64_t ld_, value_ld_;  // of the plain tiles; without Pairs they are the stacked ones too
    int64_t batch_, key_head_;
    Sequence sequence_;
    bool finite_;
    Operand* rows_;                       // [kPanel][depth or value_depth]
    Operand* queries_;                    // [kQueryTile][ld]
    Operand* dout_;                       // [kQueryTile][value_ld]
    Operand* stacked_queries_;            // [kQueryTile / kStep][columns]
    Operand* stacked_dout_;               // [kQueryTile / kStep][value_columns]
    Real* dots_;                          // [kQueryTile][kPanel]: S, then P
    Real* gradients_;                     // [kQueryTile][kPanel]: dP, then dS
    Real* keep_;                          // [kQueryTile][kPanel]
    Real* addends_;                       // [kQueryTile][kPanel]
    SoftmaxStatistics<Real> statistics_;  // [kQueryTile]
    Operand* keys_[kPanels];              // [depth][kPanel]
    Operand* values_[kPanels];            // [value_depth][kPanel]
    Real* dk_[kPanels];                   // [kPanel][columns]
    Real* dv_[kPanels];                   // [kPanel][value_columns]
    Panel<Real> panels_[kPanels];
};

}  // namespace flash::cpu::FLASH_CPU_ISA

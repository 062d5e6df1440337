// What a cluster's blocks found for the same queries, each in its part of the keys, put together by way of
// their shared memory. combine.cu does it for parts that are no cluster.
#pragma once

#include "../kernel.h"
#include "../ptx/cluster.h"
#include "../ptx/shared.h"
#include "../tile/element.h"
#include "loader.cuh"
#include "query_rows.cuh"
#include "rows.cuh"

namespace flash::cuda {

// In the shared memory of the block that has the part.
template <int kRows, int kColumns>
struct PartialRows {
    static constexpr int row_floats = kColumns + 8;  // so that 4 rows lie in different banks
    alignas(16) float out[kRows][row_floats];        // averages
    float lse[kRows];
};

// A warp's part of O, from that column on, where of_row(r) says; nullptr: nowhere.
template <class Output, class OfRow>
__device__ __forceinline__ void store_floats(const Output& out, int first_column, const OfRow& of_row) {
#pragma unroll
    for (int r = 0; r < Output::rows; ++r) {
        float* const row = of_row(r);
        if (!row) continue;
#pragma unroll
        for (int n = 0; n < Output::column_tiles; ++n)
            *reinterpret_cast<float2*>(row + first_column + lane_index() % 4 * 2 + n * 8) =
                make_float2(out.at(r, 2 * n), out.at(r, 2 * n + 1));
    }
}

// Some columns of a row: the average of the parts' averages, each weighted with its part of the sum of
// exponentials, which are taken relative to the largest so far.
struct AverageOfParts {
    static constexpr int kColumns = 4, kAtOnce = 4;  // parts

    float average[kColumns] = {}, sum = 0, largest = -INFINITY;

    struct Shares {
        float lse[kAtOnce];
        float4 out[kAtOnce];
    };

    // From the first-th part on, of so many.
    __device__ __forceinline__ static void load(Shares& shares, uint32_t out, uint32_t lse, int first,
                                                int parts) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            shares.lse[i] = -INFINITY, shares.out[i] = {};
            load_cluster(shares.lse[i], lse, first + i, first + i < parts);
            load_cluster(shares.out[i], out, first + i, first + i < parts);
        }
    }
    __device__ __forceinline__ void add(const Shares& shares) {
        const float before = largest;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) largest = fmaxf(largest, shares.lse[i]);
        const float scale = expf(before - reference());
        sum *= scale;
#pragma unroll
        for (int e = 0; e < kColumns; ++e) average[e] *= scale;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const float weight = expf(shares.lse[i] - reference());
            const float share[] = {shares.out[i].x, shares.out[i].y, shares.out[i].z, shares.out[i].w};
            sum += weight;
#pragma unroll
            for (int e = 0; e < kColumns; ++e) average[e] += weight == 0 ? 0 : weight * share[e];
        }
    }

    __device__ __forceinline__ float reference() const {
        return largest == -INFINITY ? 0 : largest;
    }
    __device__ __forceinline__ float factor() const {
        return sum == 0 ? 0 : 1 / sum;
    }
    __device__ __forceinline__ float lse() const {
        return sum == 0 ? -INFINITY : reference() + logf(sum);
    }
};

// By kThreads of each of the cluster's blocks, of which there are as many as parts; each block stores a
// share. All other threads of the block do the same for other rows, or have ended. kAtOnce: of a thread's
// shares.
template <DType dtype, int kThreads, int kAtOnce, int kRows, int kColumns>
__device__ __forceinline__ void store_together(const ForwardProblem& problem, const RowTile& tile,
                                               const QueryRows<true>& rows, int rank, int parts,
                                               const PartialRows<kRows, kColumns>& mine) {
    using Element = ElementOf<dtype>;
    constexpr int kLanes = 32, kItems = kColumns / AverageOfParts::kColumns;
    arrive_at_cluster();
    const uint32_t out = shared_address(mine.out), lse = shared_address(mine.lse);
    const int begin = int(tile.rows.begin - tile.first) * rows.heads;
    const int end = int(tile.rows.end - tile.first) * rows.heads, items = (end - begin) * kItems;
    const int lane = int(threadIdx.x) % kLanes, warp = int(threadIdx.x) % kThreads / kLanes;
    const int64_t batch = tile.unowned ? 0 : tile.batch, first_head = rows.first_head(tile);
    wait_for_cluster();
    // Neighbouring warps' shares are stored by different blocks, as there are few.
    const int stride = kThreads * parts;
#pragma unroll 1
    for (int first = (warp * parts + rank) * kLanes + lane; first < items; first += kAtOnce * stride) {
        const auto item = [&](int i) { return min(first + i * stride, items - 1); };
        const auto row = [&](int i) { return begin + item(i) / kItems; };
        const auto column = [&](int i) { return item(i) % kItems * AverageOfParts::kColumns; };
        AverageOfParts averages[kAtOnce];
#pragma unroll 1
        for (int part = 0; part < parts; part += AverageOfParts::kAtOnce) {
            AverageOfParts::Shares shares[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                AverageOfParts::load(shares[i], out + (row(i) * mine.row_floats + column(i)) * sizeof(float),
                                     lse + row(i) * sizeof(float), part, parts);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) averages[i].add(shares[i]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (first + i * stride >= items) continue;
            const Position query = tile.sequence.first_query_row + tile.first + rows.query(row(i));
            const int64_t head = first_head + rows.head(row(i));
            auto* const to = row_of<typename Element::Bits>(problem.out, batch, query, head) + column(i);
            const float factor = averages[i].factor();
#pragma unroll
            for (int e = 0; e < AverageOfParts::kColumns; ++e)
                if (column(i) + e < problem.head_dim_v)
                    to[e] = Element::from_float(averages[i].average[e] * factor);
            if (column(i) == 0) *statistics_of<float>(problem.lse, batch, query, head) = averages[i].lse();
        }
    }
    __syncwarp();
    arrive_at_cluster_relaxed();
    wait_for_cluster();  // others read what this block has
}

}  // namespace flash::cuda

// dQ of Hopper's backward. A block that does some tiles of a unit's keys has what they add to dQ added to
// sums in device memory, from which finish_dq makes dQ when all blocks are done (../any/dq_sums.cuh). A block
// that does all of them, the last keys first, stores what is first to come, adds to that, and at its last
// tile gets the sums back and adds, rounds and stores in registers: sums need not be cleared nor finished,
// and stay in the cache.
#pragma once

#include "backward_producer.cuh"

namespace flash::cuda::sm90 {

// dQ of a tile of queries: 64 x 64 for each warpgroup.
template <DType dtype, BackwardConfiguration c>
using Dq = DqTile<dtype, c.query_tile, c.head_dim, c.consumers / 32, c.query_tile / 16>;

// A warp for each warpgroup, which has its part of every dQ added to the sums. A consumer that did that
// itself would wait until the copy engine can read what it stored.
//
// turns: nullptr, or for every tile of queries two counters of the additions to its halves, 0 at the start.
// Blocks then add in the order of their keys, so that the sums do not depend on time. They wait for blocks of
// lower indices alone.
template <DType dtype, BackwardConfiguration c, bool kWholeUnits>
__device__ __forceinline__ void add_dqs(const DqSums& dq_sums, uint32_t* turns, BackwardShared<c>& shared,
                                        int warpgroup) {
    using Dq = sm90::Dq<dtype, c>;
    // DqTile counts a warp's columns first, warpgroups divide what is left of the columns last.
    constexpr int warps = c.consumers / 32, row_warps = warps / Dq::column_warps;
    constexpr uint32_t bytes = Dq::warp_elements * 4;
    const int lane = lane_index(), warp = warpgroup * 4 + lane % 4;
    const int place = (warp % row_warps * Dq::column_warps + warp / row_warps) * Dq::warp_elements;
    const uint32_t staging = shared_address(shared.dq) + warp * bytes;
    const uint32_t empty = shared_address(&shared.dq_empty[warpgroup]);
    const uint32_t full = shared_address(&shared.dq_full[warpgroup]);
    bool ready = false;  // room was made for the next tile
    uint32_t n = 0;
#pragma unroll 1
    for (uint32_t of_keys = 0;; ++of_keys) {
        shared.await_plan(of_keys);
        const BackwardPlan& plan = shared.plan(of_keys);
        if (plan.end) break;
        const bool finishes = kWholeUnits && plan.finishes_dq;
        const uint32_t unit = kWholeUnits ? blockIdx.x : plan.place.head, turn = plan.tile.first / c.key_tile;
#pragma unroll 1
        for (bool last = !plan.has_queries; !last; ++n) {
            // The note has come when the queries have, or else when dQ has: where there is room for that
            // already, the queries' stage may have been used again.
            if (finishes) {
                mbarrier_wait(in_ring(shared.q_full, n), parity(shared.q_full, n));
            } else {
                if (!ready && lane == 0) mbarrier_arrive(empty);
                mbarrier_wait(full, n % 2);
            }
            const DqNote note = shared.dq_notes[n % kDqNotes];
            last = note.last;
            const uint32_t tile =
                note.head * dq_sums.tiles_of_head() + plan.first_dq_tile + note.first / c.query_tile;
            float* const sums = dq_sums.of_tile(unit, tile) + place;
            const bool begun = !kWholeUnits || note.first >= plan.begun_from;
            if (finishes) {
                if (begun) {
                    if (lane == 0) mbarrier_expect(empty, 4 * bytes);
                    __syncwarp();
                    if (lane < 4) bulk_load(staging, sums, bytes, empty);
                }
                __syncwarp();
                if (lane == 0) mbarrier_arrive(empty);
                ready = false;
                mbarrier_wait(full, n % 2);
                __syncwarp();
                continue;
            }
            const bool waits = turns && plan.earlier.contains(note.first);
            uint32_t* const mine =
                turns + (int64_t(unit) * dq_sums.unit_tiles().divisor + tile) * 2 + warpgroup;
            if (waits)
                while (load_acquire(mine) != turn) __nanosleep(20);
            if (lane < 4) {
                fence_async_proxy();
                if (begun)
                    bulk_reduce_add(sums, staging, bytes);
                else
                    bulk_store(sums, staging, bytes);
                bulk_wait_read();
            }
            __syncwarp();
            ready = !kWholeUnits || !last;  // if it is not known what the next tile needs
            if (ready && lane == 0) mbarrier_arrive(empty);
            if (turns) {
                if (lane < 4) bulk_wait();
                __syncwarp();
                if (lane == 0) add_release(mine, waits ? 1 : turn + 1);
            }
        }
        // The next tile may add to the same sums, or get them back.
        if (lane < 4) bulk_wait();
        shared.leave_plan(of_keys);
    }
}

}  // namespace flash::cuda::sm90

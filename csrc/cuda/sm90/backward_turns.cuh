// Walks of Hopper's backward in turns: a warpgroup takes exponentials and forms dS while the other one
// multiplies. A warpgroup that starts products waits until nearly all of them have been accepted, so that
// nothing of its own runs beside them but the last one; only the other warpgroup can. A turn is dV of a tile
// of queries, dQ, dK, and S and dP of the next tile. Of dQ each warpgroup multiplies a part, with the dS of
// both: the second one in the same turn, the first one in its next turn, when the other one's dS is there.
#pragma once

#include "backward.cuh"

namespace flash::cuda::sm90 {

template <DType dtype, BackwardConfiguration c, bool kInWalk>
__device__ __forceinline__ bool BackwardConsumer<dtype, c, kInWalk>::walk_in_turns(const BackwardPlan& plan,
                                                                                   uint32_t tile,
                                                                                   uint32_t& n) {
    constexpr bool kBranches = c.head_dim == 64;  // where there is no dQ yet; at 128 that costs 3 %
    const bool later = warpgroup_ == 0;
    Scores s, dp;
    typename Dq::Accumulators dq;
    await_queries(n);
    uint32_t flags = shared_.notes[n % c.stages].flags;
    mbarrier_wait(shared_address(&shared_.k_full), tile % 2);
    keys_.template load<KeyTile>(shared_.k, warp_row());
    mbarrier_wait(shared_address(&shared_.v_full), tile % 2);
    values_.template load<KeyTile>(shared_.v, warp_row());
    await_douts(n);
    await_turn();
    wgmma_fence();
    start_scores(s, n);
    start_gradients(dp, n);
    pass_turn();
    wgmma_wait<1>();
    keep(registers_of(s));
    look_for_bad_keys(s, tile);
    await_stores();
    const auto lse_of = [&](int i) { return late_lse(i, n); };
    for (bool first = true;; first = false) {
        const QueryNote& note = shared_.notes[n % c.stages];
        QueryWords<c> words{};
        if (flags & QueryNote::masked && note.bits) words.load(problem_.forward, shared_, note, warp_row());
        wgmma_wait<1>();
        keep(registers_of(s));
        exponentiate<0>(s, lse_of);
        wgmma_wait<0>();
        keep(registers_of(dp));
        if (flags & QueryNote::last) leave_values();
        keep(registers_of(half_of<1>(s)));  // not before
        exponentiate<1>(s, lse_of);
        differentiate<0>(s, dp, n);
        differentiate<1>(s, dp, n);
        if (flags & QueryNote::masked) mask(s, dp, flags, words, n);
        Operand p(s), ds(dp);
        await_turn();  // the other warpgroup has multiplied what was where this dS goes
        store_ds<0>(ds, n);
        start_dv<0>(p, n);
        // Asked early, since an answer takes a hundred cycles; true, mostly.
        const bool has_room = !kInWalk && has_room_for_dq(n - later);
        const bool has_next = c.head_dim == 96 && has_queries(n + 1);  // 2 %, elsewhere 0 to -1
        fence_async_proxy();
        const bool has_dq = !first || !later;
        if (kBranches && !has_dq) {
            wgmma_fence();
            start_dk<0>(ds, n);
            wgmma_wait<0>();
        } else {
            if (!later) meet_own();
            wgmma_fence();
            start_dq(dq, n - later);  // perhaps of nothing, and not used
            start_dk<0>(ds, n);
            wgmma_wait<1>();
            keep(registers_of(dq));
            if (kBranches || has_dq) {
                const DqEnd end = has_room ? DqEnd::none : await_room_for_dq(n - later);
                hand_over(dq, end, flags, n - later);
            }
            wgmma_wait<0>();
        }
        leave(n);
        if (flags & QueryNote::last) break;
        ++n;
        if (!has_next) await_queries(n);
        flags = shared_.notes[n % c.stages].flags;
        wgmma_fence();
        start_scores(s, n);
        await_douts(n);
        wgmma_fence();
        start_gradients(dp, n);
        pass_turn();
    }
    if (!later) leave_keys();
    pass_turn();
    // Beside the other one's products. Of one place the other one's last dQ still needs what is there.
    if (later) meet_own();  // of the dQ before that all warps have multiplied their parts
    keep(registers_of(dv_));
    const bool values_stored = (later || !c.one_place()) && store_values(plan.tile, n + 1);
    await_turn();
    if (later) {
        wgmma_fence();
        start_dq(dq, n);
        const DqEnd end = await_room_for_dq(n);
        wgmma_wait<0>();
        keep(registers_of(dq));
        hand_over(dq, end, flags, n);
        leave_keys();
        if constexpr (ScoreTile::panels == 1) meet_own();  // dK goes where its dS was, too
    }
    pass_turn();
    ++n;
    keep(registers_of(dk_));
    keep(registers_of(dv_));
    return values_stored;
}

}  // namespace flash::cuda::sm90

// Long walks of Hopper's backward at head dim 64. A warpgroup that starts products waits until nearly all of
// them have been accepted, so that nothing of its own runs beside them; only the other warpgroup can. Here
// one takes exponentials and forms dS while the other one multiplies: a turn is dV and dK of a tile of
// queries, dQ of the tile before, whose dS the other warpgroup has stored in its last turn, and S and dP of
// the next tile.
#pragma once

#include "backward.cuh"

namespace flash::cuda::sm90 {

template <DType dtype, BackwardConfiguration c, bool kInWalk>
__device__ __forceinline__ void BackwardConsumer<dtype, c, kInWalk>::walk_in_turns(uint32_t tile,
                                                                                   uint32_t& n) {
    Scores s, dp;
    typename Dq::Accumulators dq;
    await_queries(n);
    uint32_t flags = shared_.notes[n % c.stages].flags;
    mbarrier_wait(shared_address(&shared_.k_full), tile % 2);
    mbarrier_wait(shared_address(&shared_.v_full), tile % 2);
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
    for (bool first = true;; first = false) {
        const QueryNote& note = shared_.notes[n % c.stages];
        QueryWords<c> words{};
        if (flags & QueryNote::masked && note.bits) words.load(problem_.forward, shared_, note, warp_row());
        wgmma_wait<1>();
        keep(registers_of(s));
        const Pairs none{};  // lse is read where it is wanted
        exponentiate<0>(s, none, n);
        wgmma_wait<0>();
        keep(registers_of(dp));
        if (flags & QueryNote::last) leave_values();
        keep(registers_of(half_of<1>(s)));  // not before
        exponentiate<1>(s, none, n);
        differentiate<0>(s, dp, n);
        differentiate<1>(s, dp, n);
        if (flags & QueryNote::masked) mask(s, dp, flags, words, n);
        Operand p(s), ds(dp);
#pragma unroll
        for (int k = 0; k < Operand::columns / 16; ++k) {  // not later
            keep(p.value[k][0]);
            keep(ds.value[k][0]);
        }
        await_turn();  // the other warpgroup has multiplied what was where this dS goes
        store_ds<0>(ds, n);
        start_dv<0>(p, n);
        fence_async_proxy();
        start_dk<0>(ds, n);
        if (first) {
            wgmma_wait<0>();
            leave(n);
        } else {
            wgmma_fence();
            start_dq(dq, n - 1);
            wgmma_wait<1>();
            leave(n);
            const DqEnd end = await_room_for_dq(n - 1);
            wgmma_wait<0>();
            keep(registers_of(dq));
            hand_over(dq, end, flags, n - 1);
        }
        if (flags & QueryNote::last) break;
        ++n;
        await_queries(n);
        flags = shared_.notes[n % c.stages].flags;
        await_douts(n);
        wgmma_fence();
        start_scores(s, n);
        start_gradients(dp, n);
        pass_turn();
    }
    pass_turn();
    await_turn();
    wgmma_fence();
    start_dq(dq, n);
    const DqEnd end = await_room_for_dq(n);
    wgmma_wait<0>();
    keep(registers_of(dq));
    leave_keys();
    hand_over(dq, end, flags, n);
    pass_turn();
    ++n;
    keep(registers_of(dk_));
    keep(registers_of(dv_));
}

}  // namespace flash::cuda::sm90

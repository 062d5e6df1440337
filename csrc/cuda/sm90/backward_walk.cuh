// Walks of Hopper's backward where warpgroups take no turns: both run S and dP at the same time, then their
// exponentials and dS, then what reads dS; stores to shared memory are beside dV and dK, and at head dim 128
// also the exponentials and dS of the second half of a tile's queries, beside those of the first one.
#pragma once

#include "backward.cuh"

namespace flash::cuda::sm90 {

template <DType dtype, BackwardConfiguration c, bool kInWalk>
__device__ __forceinline__ void BackwardConsumer<dtype, c, kInWalk>::walk(uint32_t tile, uint32_t& n) {
    Scores s, dp;
    typename Dq::Accumulators dq;
    await_queries(n);
    uint32_t flags = shared_.notes[n % c.stages].flags;
    Pairs lse;
    load_early(lse, n);
    const auto lse_of = [&](int i) { return kEarlyLse ? lse.of[i] : late_lse(i, n); };
    mbarrier_wait(shared_address(&shared_.k_full), tile % 2);
    keys_.template load<KeyTile>(shared_.k, warp_row());
    wgmma_fence();
    start_scores(s, n);
    mbarrier_wait(shared_address(&shared_.v_full), tile % 2);
    values_.template load<KeyTile>(shared_.v, warp_row());
    await_douts(n);
    wgmma_fence();
    start_gradients(dp, n);
    wgmma_wait<1>();
    keep(registers_of(s));
    look_for_bad_keys(s, tile);
    await_stores();
    const uint32_t begin = n;
    while (true) {
        const QueryNote& note = shared_.notes[n % c.stages];
        QueryWords<c> words{};
        if (flags & QueryNote::masked && note.bits)  // on their way while S is waited for
            words.load(problem_.forward, shared_, note, warp_row());
        wgmma_wait<1>();
        keep(registers_of(s));
        if constexpr (c.transformed) {
            transformed(n).scale_and_cap(s);
            transformed(n).add_alibi(s);
        }
        bool bias_hides = false;
        if constexpr (c.biased) bias_hides = add_bias(s, n);
        const bool whole = !kInHalves || flags & QueryNote::masked;
        exponentiate<0>(s, lse_of);
        wgmma_wait<0>();
        keep(registers_of(dp));
        if (flags & QueryNote::last) leave_values();
        if (whole) {
            keep(registers_of(half_of<1>(s)));  // not before
            exponentiate<1>(s, lse_of);
        }
        differentiate<0>(s, dp, n);
        if (whole) differentiate<1>(s, dp, n);
        if constexpr (c.transformed && !c.biased) differentiate_cap(s, dp, n);
        if (flags & QueryNote::masked) mask(s, dp, flags, words, n);
        if constexpr (c.biased)
            if (bias_hides) clear_hidden(s, dp);
        if constexpr (Shared::kBuffers == 1) meet();  // everybody's last dQ is multiplied
        if (c.one_place() && warpgroup_ == 1 && n != begin) barrier_of<c.consumers>(kRoom);
        if constexpr (kInHalves) {
            HalfOperand p[2], ds[2];  // here, since products read them until they are waited for
            start_dv<0>(half_of<0>(s), half_of<0>(dp), p[0], ds[0], n);
            start_dk<0>(ds[0], n);
            if (!whole) {
                keep(registers_of(half_of<1>(s)));
                keep(registers_of(half_of<1>(dp)));
                exponentiate<1>(s, lse_of);
                differentiate<1>(s, dp, n);
            }
            start_dv<1>(half_of<1>(s), half_of<1>(dp), p[1], ds[1], n);
            meet_for_dq();
            start_dq(dq, n);
            start_dk<1>(ds[1], n);
        } else {
            Operand p, ds;
            start_dv<0>(s, dp, p, ds, n);
            meet_for_dq();
            start_dq(dq, n);
            start_dk<0>(ds, n);
        }
        const DqEnd end = await_room_for_dq(n);
        wgmma_wait<1>();
        keep(registers_of(dq));
        if (c.one_place() && warpgroup_ == 0) arrive_at_barrier_of<c.consumers>(kRoom);
        if (flags & QueryNote::last) leave_keys();
        hand_over(dq, end, flags, n);
        wgmma_wait<0>();
        leave(n);
        ++n;
        if (flags & QueryNote::last) break;
        await_queries(n);
        flags = shared_.notes[n % c.stages].flags;
        load_early(lse, n);
        wgmma_fence();
        start_scores(s, n);
        await_douts(n);
        wgmma_fence();
        start_gradients(dp, n);
    }
    if (c.one_place() && warpgroup_ == 1) barrier_of<c.consumers>(kRoom);
    keep(registers_of(dk_));
    keep(registers_of(dv_));
}

}  // namespace flash::cuda::sm90

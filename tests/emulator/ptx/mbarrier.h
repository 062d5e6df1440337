#pragma once

namespace flash::cuda {

inline emulator::Mbarrier* mbarrier_at(uint32_t address) {
    return emulator::at_shared<emulator::Mbarrier>(address);
}

inline void mbarrier_init(uint32_t barrier, int arrivals) {
    *mbarrier_at(barrier) = {int16_t(arrivals), int16_t(arrivals), 0, 0};
}

inline void mbarrier_arrive(uint32_t barrier) {
    mbarrier_at(barrier)->arrive();
}

inline void mbarrier_expect(uint32_t barrier, int bytes) {
    mbarrier_at(barrier)->expect(bytes);
}

constexpr int kWarpArrivals = 1;

inline void mbarrier_arrive_warp(uint32_t barrier, uint32_t thread) {
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(barrier);
}

inline void mbarrier_arrive_warp(uint32_t barrier) { mbarrier_arrive_warp(barrier, threadIdx.x); }

inline void mbarrier_arrive_behind_copies(uint32_t barrier) {
    emulator::start([=] { mbarrier_arrive(barrier); });
}

inline bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    return mbarrier_at(barrier)->phase != parity;
}

inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    const auto* const waited_for = mbarrier_at(barrier);
    emulator::wait_until([=] { return waited_for->phase != parity; },
                         emulator::event_of(waited_for, parity));
}

}  // namespace flash::cuda

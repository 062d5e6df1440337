#pragma once

namespace flash::cuda {

inline void arrive_at_cluster() {
    emulator::arrive_at_cluster();
}
inline void arrive_at_cluster_relaxed() {
    emulator::arrive_at_cluster();
}
inline void wait_for_cluster() {
    emulator::wait_for_cluster();
}

template <class T>
void load_cluster(T& x, uint32_t address, uint32_t rank, bool really) {
    emulator::at_shared<T>(address);  // is it one?
    if (really) x = *reinterpret_cast<const T*>(emulator::shared_memory_of(rank) + address);
}

}  // namespace flash::cuda

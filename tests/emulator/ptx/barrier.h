#pragma once

namespace flash::cuda {

template <int kThreads>
void barrier_of(int name) {
    emulator::meet(name, kThreads);
}

template <int kThreads>
void arrive_at_barrier_of(int name) {
    emulator::arrive(name, kThreads);
}

}  // namespace flash::cuda

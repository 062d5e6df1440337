#pragma once

namespace flash::cuda {

template <int kThreads>
void barrier_of(int name) {
    emulator::meet(name, kThreads);
}

}  // namespace flash::cuda

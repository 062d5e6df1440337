#pragma once

namespace flash::cuda {

inline void reduce_add(float* global, float x) {
    *global += x;
}

inline void reduce_add(float4* global, float4 x) {
    global->x += x.x, global->y += x.y, global->z += x.z, global->w += x.w;
}

inline void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
    const float* const from = emulator::at_shared<float>(shared, bytes, 16);
    if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16)
        emulator::fail("cp.reduce.async.bulk: alignment");
    emulator::start([=] {
        for (uint32_t i = 0; i < bytes / 4; ++i) global[i] += from[i];
    });
    emulator::end_group();
}

inline void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
    const float* const from = emulator::at_shared<float>(shared, bytes, 16);
    if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) emulator::fail("cp.async.bulk: alignment");
    emulator::start([=] { std::memcpy(global, from, bytes); });
    emulator::end_group();
}

inline void bulk_load(uint32_t shared, const float* global, uint32_t bytes, uint32_t barrier) {
    float* const to = emulator::at_shared<float>(shared, bytes, 16);
    auto* const told = emulator::at_shared<emulator::Mbarrier>(barrier);
    if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) emulator::fail("cp.async.bulk: alignment");
    emulator::start([=] {
        std::memcpy(to, global, bytes);
        told->receive(bytes);
    });
}

inline void bulk_commit() {
    emulator::end_group();
}

inline void bulk_wait_read() {
    emulator::wait_for_all();
}

inline void bulk_wait() {
    emulator::wait_for_all();
}

}  // namespace flash::cuda

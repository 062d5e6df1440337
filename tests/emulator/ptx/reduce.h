#pragma once

namespace flash::cuda {

inline void reduce_add(float* global, float x) {
    *global += x;
}

inline void reduce_add(float4* global, float4 x) {
    global->x += x.x, global->y += x.y, global->z += x.z, global->w += x.w;
}

}  // namespace flash::cuda

// Tensor maps of q, k and v for the tensor memory accelerator (ptx/tma.h): made on the host at every launch,
// which takes no word of the driver's but the encoding. The driver's function is looked up, not linked.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../launch.h"
#include "../tile/element.h"

namespace flash::cuda::sm90 {

constexpr int kPanel = 64;  // 16-bit elements in a panel's row of 128 bytes

// Rows of all heads: [batch, rows, heads, head_dim], batch 1 where sequences are packed.
struct Rows {
    const TensorView& view;
    int64_t batch, rows, heads, head_dim;
};

inline bool fits_tensor_map(const Rows& rows, int64_t bytes) {
    const auto counts = [](int64_t extent) { return extent > 0 && extent <= INT32_MAX; };  // coordinates
    const auto fits = [&](int64_t extent, int64_t stride) {
        return extent == 1 || (stride > 0 && stride * bytes % 16 == 0 && stride * bytes < int64_t(1) << 40);
    };
    return counts(rows.batch) && counts(rows.rows) && counts(rows.heads) && counts(rows.head_dim) &&
           reinterpret_cast<uintptr_t>(rows.view.data) % 16 == 0 &&
           fits(rows.batch, rows.view.batch_stride) && fits(rows.rows, rows.view.row_stride) &&
           fits(rows.heads, rows.view.head_stride);
}

// Boxes are kPanel elements of box_rows rows of one head, swizzled as TileLayout's panels.
inline CUtensorMap tensor_map(const Rows& rows, DType dtype, int box_rows) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
        check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                               &found),
              "cuTensorMapEncodeTiled");
#else
        check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
              "cuTensorMapEncodeTiled");
#endif
        if (found != cudaDriverEntryPointSuccess)
            throw std::runtime_error("flash_attn: this driver has no cuTensorMapEncodeTiled");
        return reinterpret_cast<Encode>(function);
    }();
    const cuuint64_t bytes = element_bytes(dtype);
    const auto stride = [&](int64_t extent, int64_t elements) {
        return extent == 1 ? cuuint64_t(16) : cuuint64_t(elements) * bytes;
    };
    const cuuint64_t extents[] = {cuuint64_t(rows.head_dim), cuuint64_t(rows.rows), cuuint64_t(rows.heads),
                                  cuuint64_t(rows.batch)};
    const cuuint64_t strides[] = {stride(rows.rows, rows.view.row_stride),
                                  stride(rows.heads, rows.view.head_stride),
                                  stride(rows.batch, rows.view.batch_stride)};
    const cuuint32_t box[] = {kPanel, cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result = encode(
        &map, dtype == DType::bfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        4, rows.view.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("flash_attn: cuTensorMapEncodeTiled reports error " +
                                 std::to_string(int(result)));
    return map;
}

}  // namespace flash::cuda::sm90

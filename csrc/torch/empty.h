// New tensors by torch's C functions: the stable ABI's new_empty asks the dispatcher twice, a microsecond
// each.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace flash {

// Contiguous, on like's device, of any content.
inline torch::stable::Tensor new_empty(const torch::stable::Tensor& like, const std::vector<int64_t>& sizes,
                                       torch::headeronly::ScalarType dtype) {
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
        strides[i] = stride;
        stride *= sizes[i] > 0 ? sizes[i] : 1;
    }
    int32_t device_type, device_index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides.data(),
                                 torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
                                 device_type, device_index, &made));
    return torch::stable::Tensor(made);
}

}  // namespace flash

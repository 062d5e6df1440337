// What the user gave, what is needed: every check of the operators throws a std::runtime_error (RuntimeError
// in Python) with a sentence that names the argument, before any work is done or any output allocated.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string>

namespace flash {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline std::string text(const char* part) {
    return part;
}
inline std::string text(const std::string& part) {
    return part;
}
// No streams here: they need the C++ runtime's locales, of which a process may hold two.
template <class Number>
std::string text(Number part) {
    char digits[32];
    return std::string(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
}

template <class... Parts>
void check(bool holds, const Parts&... parts) {
    if (!holds) throw std::runtime_error(("flash_attn: " + ... + text(parts)));
}

inline std::string name_of(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Half:
            return "float16";
        case ScalarType::BFloat16:
            return "bfloat16";
        case ScalarType::Float:
            return "float32";
        case ScalarType::Double:
            return "float64";
        case ScalarType::Int:
            return "int32";
        case ScalarType::Long:
            return "int64";
        case ScalarType::Bool:
            return "bool";
        default:
            return "dtype number " + std::to_string(int(dtype));
    }
}

// What a message says of a tensor, spelt out only where the message is thrown: small calls are short enough
// for their checks to count.
struct ShapeOf {
    const Tensor& tensor;
};
struct DtypeAndShapeOf {
    const Tensor& tensor;
};
struct DeviceOf {
    const Tensor& tensor;
};

inline std::string text(const ShapeOf& shape) {
    std::string listed = "[";
    for (const int64_t size : shape.tensor.sizes())
        listed += (listed.size() > 1 ? ", " : "") + std::to_string(size);
    return listed + "]";
}

inline std::string text(const DtypeAndShapeOf& both) {
    return name_of(both.tensor.scalar_type()) + " " + text(ShapeOf{both.tensor});
}

inline std::string text(const DeviceOf& device) {
    if (device.tensor.is_cpu()) return "cpu";
    return (device.tensor.is_cuda() ? "cuda:" : "device ") + std::to_string(device.tensor.get_device_index());
}

inline void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected) {
    const auto sizes = tensor.sizes();
    if (std::equal(sizes.begin(), sizes.end(), expected.begin(), expected.end())) return;
    std::string wanted = "[";
    for (const int64_t size : expected) wanted += (wanted.size() > 1 ? ", " : "") + std::to_string(size);
    check(false, name, " has shape ", ShapeOf{tensor}, "; it must be ", wanted, "]");
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType expected, const char* why) {
    check(tensor.scalar_type() == expected, name, " is ", name_of(tensor.scalar_type()), "; it must be ",
          name_of(expected), why);
}

inline void check_device(const char* name, const Tensor& tensor, const Tensor& q) {
    check(tensor.device() == q.device(), name, " is on ", DeviceOf{tensor}, " and q on ", DeviceOf{q},
          "; all tensors must be on one device");
}

}  // namespace flash

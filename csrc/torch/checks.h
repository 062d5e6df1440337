// What the user gave, what is needed: every check of the operators throws a std::runtime_error (RuntimeError
// in Python) with a sentence that names the argument, before any work is done or any output allocated.
#pragma once

#include <torch/csrc/stable/tensor.h>

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

inline std::string shape_of(const Tensor& tensor) {
    std::string shape = "[";
    for (const int64_t size : tensor.sizes()) shape += (shape.size() > 1 ? ", " : "") + std::to_string(size);
    return shape + "]";
}

inline std::string describe(const Tensor& tensor) {
    return name_of(tensor.scalar_type()) + " " + shape_of(tensor);
}

inline void check_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> expected) {
    bool equal = tensor.dim() == int64_t(expected.size());
    int64_t dim = 0;
    std::string wanted = "[";
    for (const int64_t size : expected) {
        equal = equal && tensor.size(dim++) == size;
        wanted += (wanted.size() > 1 ? ", " : "") + std::to_string(size);
    }
    check(equal, name, " has shape ", shape_of(tensor), "; it must be ", wanted, "]");
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType expected, const char* why) {
    check(tensor.scalar_type() == expected, name, " is ", name_of(tensor.scalar_type()), "; it must be ",
          name_of(expected), why);
}

inline void check_device(const char* name, const Tensor& tensor) {
    check(tensor.is_cpu(), name, " is not on the CPU, but q is; all tensors must be on one device");
}

}  // namespace flash

// The GPUs of this process. Asking starts CUDA's driver in it, so nothing asks before a tensor is on a GPU or
// the user wants to know.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace flash::cuda {

struct Devices {
    std::vector<Device> found;
    std::string why_none;  // empty if there are some
};

// Asked once and kept.
const Devices& devices();

}  // namespace flash::cuda

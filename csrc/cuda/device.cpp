#include "device.h"

#if defined(FLASH_CUDA)
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#endif

namespace flash::cuda {
namespace {

#if defined(FLASH_CUDA)

std::string decimal(int version) {  // of 13020
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string why_none(cudaError_t error) {
    int driver = 0;
    if (error != cudaErrorInsufficientDriver || cudaDriverGetVersion(&driver) != cudaSuccess)
        return std::string("CUDA reports: ") + cudaGetErrorString(error);
    if (driver == 0) return "this machine has no CUDA driver";
    return "this build needs a driver of CUDA " + decimal(CUDART_VERSION) + ", this machine's is of CUDA " +
           decimal(driver);
}

// Bytes of shared memory that a block may take, or fewer if FLASH_ATTN_SHARED_BYTES says so: how tests and
// benchmarks reach, on one machine, the kernels of chips that have less. Builds for several generations hold
// those for chips with less alone (kernel_table.py, small).
int64_t within_wish(int64_t bytes) {
    const char* const wish = std::getenv("FLASH_ATTN_SHARED_BYTES");
    return wish ? std::min<int64_t>(bytes, std::atoll(wish)) : bytes;
}

Devices query() {
    Devices devices;
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    for (int index = 0; error == cudaSuccess && index < count; ++index) {
        const auto attribute = [&](cudaDeviceAttr name) {
            int value = 0;
            if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, name, index);
            return value;
        };
        const int major = attribute(cudaDevAttrComputeCapabilityMajor);
        const int minor = attribute(cudaDevAttrComputeCapabilityMinor);
        devices.found.push_back({index, 10 * major + minor, attribute(cudaDevAttrMultiProcessorCount),
                                 within_wish(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)),
                                 attribute(cudaDevAttrL2CacheSize)});
    }
    if (error == cudaSuccess) return devices;
    cudaGetLastError();  // or the next launch would report it as its own
    return {{}, why_none(error)};
}

#else

Devices query() {
    return {{}, "this build has only the CPU engine"};
}

#endif

}  // namespace

const Devices& devices() {
    static const Devices asked = query();
    return asked;
}

}  // namespace flash::cuda

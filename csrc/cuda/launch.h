// Starting a kernel: its shared memory, its grid, and errors that say which kernel it was.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "kernel.h"

namespace flash::cuda {

inline void check(cudaError_t error, const char* what) {
    if (error != cudaSuccess)
        throw std::runtime_error(std::string("flash_attn: ") + what + ": " + cudaGetErrorString(error));
}

inline void set_zero(void* data, int64_t bytes, const char* kernel, const Launch& launch) {
    check(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(launch.stream)), kernel);
}

// Blocks are counted along x alone: y and z end at 65535.
template <class... Parameters, class... Arguments>
void launch_kernel(const char* name, void (*kernel)(Parameters...), int64_t blocks, int threads,
                   int64_t shared_bytes, const Launch& launch, const Arguments&... arguments) {
    if (blocks == 0) return;
    if (blocks > 0x7fffffff)
        throw std::runtime_error(std::string("flash_attn: ") + name + " needs " + std::to_string(blocks) +
                                 " blocks; at most 2147483647 can be started");
    if (shared_bytes > 48 * 1024)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes)),
              name);
    if (launch.cluster > kPortableCluster)
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), name);
    cudaLaunchAttribute attributes[2]{};
    unsigned count = 0;
    if (launch.overlaps) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch.cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {unsigned(launch.cluster), 1, 1};
    }
    const cudaLaunchConfig_t config{unsigned(blocks),     unsigned(threads),
                                    size_t(shared_bytes), static_cast<cudaStream_t>(launch.stream),
                                    attributes,           count};
    check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), name);
}

}  // namespace flash::cuda

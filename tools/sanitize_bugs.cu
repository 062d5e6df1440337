// One bug for each of compute-sanitizer's tools. On some virtual machines a tool runs, sees no kernel, and calls
// everything clean: tools/sanitize.sh believes a tool that finds its bug here.
#include <cstdio>
#include <cstring>

__global__ void flash_beyond_the_end(int* memory) { memory[64 + threadIdx.x] = 1; }

__global__ void flash_race(int* memory) {
    volatile __shared__ int last;
    last = threadIdx.x;
    memory[threadIdx.x] = last;
}

__global__ void flash_divergent_barrier(int* memory) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    memory[threadIdx.x] = 1;
}

__global__ void flash_uninitialised(int* memory) { memory[threadIdx.x + 32] = memory[threadIdx.x] + 1; }

int main(int, char** arguments) {
    int* memory;
    cudaMalloc(&memory, 64 * sizeof(int));
    const char* const tool = arguments[1];
    if (!std::strcmp(tool, "memcheck")) flash_beyond_the_end<<<1, 32>>>(memory);
    if (!std::strcmp(tool, "racecheck")) flash_race<<<1, 64>>>(memory);
    if (!std::strcmp(tool, "synccheck")) flash_divergent_barrier<<<1, 64>>>(memory);
    if (!std::strcmp(tool, "initcheck")) flash_uninitialised<<<1, 32>>>(memory);
    std::printf("%s: %s\n", tool, cudaGetErrorString(cudaDeviceSynchronize()));
}

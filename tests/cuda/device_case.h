// What the device tests share: memory that starts as NaN, random numbers, and a printed line for each case.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

namespace flash {

inline void check(cudaError_t status) {
    if (status == cudaSuccess) return;
    std::printf("FAILED %s\n", cudaGetErrorString(status));
    std::exit(2);
}

inline std::mt19937& generator() {
    static std::mt19937 generator;
    return generator;
}

inline double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(generator());
}

inline uint32_t random_bits() {
    return uint32_t(generator()());
}

// Device memory; without numbers to hold it holds NaN, or the integer -1.
template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(size_t count) : count_(count) {
        check(cudaMalloc(&data_, count * sizeof(T)));
        check(cudaMemset(data_, 0xff, count * sizeof(T)));
    }
    explicit DeviceArray(const std::vector<T>& numbers) : DeviceArray(numbers.size()) {
        check(cudaMemcpy(data_, numbers.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    DeviceArray(const DeviceArray&) = delete;
    ~DeviceArray() { cudaFree(data_); }

    T* data() const { return data_; }
    // After the kernels launched so far.
    std::vector<T> read() const {
        std::vector<T> numbers(count_);
        check(cudaGetLastError());
        check(cudaMemcpy(numbers.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
        return numbers;
    }

  private:
    size_t count_;
    T* data_ = nullptr;
};

// The largest error of a case, in the unit of its budget.
class Case {
  public:
    Case(std::string name, double budget) : name_(std::move(name)), budget_(budget) {}

    // NaN is the largest error of all.
    void error(double error) {
        largest_ = error <= largest_ ? largest_ : std::isnan(error) ? INFINITY : error;
    }
    void expect(bool right) { error(right ? 0 : INFINITY); }
    // NaN, whichever, or the very number.
    void same(double actual, double expected) {
        expect(std::isnan(expected) ? std::isnan(actual) : actual == expected);
    }

    // True if right.
    bool report() const {
        const bool right = largest_ <= budget_;
        std::printf("%s %s: max error %.3g, budget %.3g\n", right ? "ok" : "FAILED", name_.c_str(), largest_,
                    budget_);
        return right;
    }

  private:
    std::string name_;
    double budget_, largest_ = 0;
};

// Runs the cases, each of which reports; the first argument is the seed.
template <size_t count>
int run_cases(int argc, char** argv, bool (*const (&cases)[count])()) {
    const unsigned seed = argc > 1 ? unsigned(std::strtoul(argv[1], nullptr, 10)) : std::random_device()();
    std::printf("seed %u\n", seed);
    generator().seed(seed);
    bool right = true;
    for (const auto run : cases) right &= run();
    check(cudaDeviceSynchronize());
    return right ? 0 : 1;
}

}  // namespace flash

// Division against the machine's own: random divisors and dividends, and those next to multiples, powers of
// two and the ends of the range. Prints the number of divisions; a failure returns 1.
#include "../../csrc/cuda/division.h"

#include <cstdio>
#include <random>
#include <vector>

using flash::cuda::Division;

int main() {
    constexpr uint32_t largest = 0x7fffffff;
    std::mt19937 random(std::random_device{}());
    std::vector<uint32_t> numbers{1, 2, 3, 7, 64, 641, 65535, 65536, largest - 1, largest};
    for (int shift = 2; shift < 31; ++shift)
        for (uint32_t x : {(1u << shift) - 1, 1u << shift, (1u << shift) + 1}) numbers.push_back(x);
    for (int i = 0; i < 300; ++i) numbers.push_back((random() & largest) >> random() % 31 | 1);
    long count = 0;
    for (const uint32_t divisor : numbers) {
        const Division division(divisor);
        const auto right = [&](uint64_t dividend) {
            if (dividend > largest) return true;
            const auto x = uint32_t(dividend);
            ++count;
            return division.quotient(x) == x / divisor && division.remainder(x) == x % divisor;
        };
        for (const uint32_t x : numbers) {
            const uint64_t multiple = uint64_t(x) * divisor;
            if (!right(x) || !right(0) || !right(multiple) || !right(multiple - 1)) {
                std::printf("wrong by %u near %u\n", divisor, x);
                return 1;
            }
        }
    }
    std::printf("%ld divisions\n", count);
}

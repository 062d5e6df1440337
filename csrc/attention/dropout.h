// Dropout of probabilities as a pure function of (seed, offset, batch and head, query, key): Philox-4x32-10
// (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), 16 bits a score. Every engine,
// tile shape, thread count and pass draws the same bits.
//
// One call serves 8 scores of a 16 x 16 patch of the score matrix: queries g and g + 8, keys 2t, 2t + 1, 2t +
// 8 and 2t + 9, which is what one thread holds of a 16 x 16 patch in the tensor cores' accumulators.
#pragma once

#include <cstdint>

#include "../problem.h"
#include "host_device.h"

namespace flash {

struct Philox {
    uint32_t word[4];
};

FLASH_HOST_DEVICE Philox philox_4x32_10(Philox counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t product0 = uint64_t(0xD2511F53u) * counter.word[0];
        const uint64_t product1 = uint64_t(0xCD9E8D57u) * counter.word[2];
        counter = {{uint32_t(product1 >> 32) ^ counter.word[1] ^ key0, uint32_t(product1),
                    uint32_t(product0 >> 32) ^ counter.word[3] ^ key1, uint32_t(product0)}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

struct Dropout {
    static constexpr int patch = 16;  // queries and keys of a patch
    static constexpr int calls_per_patch = 32;
    static constexpr int scores_per_call = 8;

    uint32_t key0, key1, offset;
    uint32_t batch_head;
    uint32_t threshold;

    Dropout() = default;  // undefined
    FLASH_HOST_DEVICE Dropout(const ForwardProblem& problem, int64_t batch, int64_t head)
        : key0(uint32_t(problem.rng_state[0])),
          key1(uint32_t(uint64_t(problem.rng_state[0]) >> 32) ^
               uint32_t(uint64_t(problem.rng_state[1]) >> 32)),
          offset(uint32_t(problem.rng_state[1])),
          batch_head(uint32_t(batch * problem.heads_q + head)),
          threshold(problem.dropout_threshold) {}

    // Kept probabilities are divided by the chance of being kept, so that the expectation is exact although
    // the dropout probability is a multiple of 2^-16.
    FLASH_HOST_DEVICE double keep_scale() const { return 65536.0 / (65536.0 - threshold); }

    // call counts within the patch: (query % 8) * 4 + (key % 8) / 2.
    FLASH_HOST_DEVICE Philox bits(uint32_t query_patch, uint32_t key_patch, uint32_t call) const {
        return philox_4x32_10({{key_patch * calls_per_patch + call, query_patch, batch_head, offset}}, key0,
                              key1);
    }

    // slot counts within the call: (query / 8 % 2) * 4 + (key / 8 % 2) * 2 + key % 2.
    FLASH_HOST_DEVICE bool keep(const Philox& bits, int slot) const {
        return ((bits.word[slot / 2] >> (slot % 2 * 16)) & 0xffffu) >= threshold;
    }

    FLASH_HOST_DEVICE bool keep(int64_t query, int64_t key) const {
        const uint32_t call = uint32_t(query % 8 * 4 + key % 8 / 2);
        const int slot = int(query / 8 % 2 * 4 + key / 8 % 2 * 2 + key % 2);
        return keep(bits(uint32_t(query / patch), uint32_t(key / patch), call), slot);
    }
};

}  // namespace flash

// Small kernels around attention, one row of one head at a time; element types at run time.
#pragma once

#include "../../attention/sequence.h"
#include "../kernel.h"
#include "delta_progress.cuh"

namespace flash::cuda {

// problem.delta = rowsum(dO * O) - dlse (docs/algorithm.md), 0 for rows that saw no key.
void compute_delta(const BackwardProblem& problem, const Launch& launch);
// That, and lse in log 2, infinite for rows that saw no key, so that every probability of theirs is 0; both
// by aligned rows, whose Q are whole vectors of 16 bytes. delta is NaN where a softcap would hide that a row
// of Q is not finite. not_finite becomes 1 if lse or delta is not, and stays what it was else.
struct AlignedStatistics {
    RowStatistics lse_log2, delta;
    AlignedRows rows;
    uint32_t* not_finite;
    DeltaProgress progress;
};
void compute_delta(const BackwardProblem& problem, const AlignedStatistics& to, const Launch& launch);
// The same of a dense batch, the same bits, on Hopper by few blocks, a multiprocessor each, beside those of
// the next grid, which waits for each head's (progress, whose `all` is set). In the order in which rows lie.
void compute_delta_beside(const BackwardProblem& problem, AlignedStatistics& to, int64_t blocks,
                          const Launch& launch);
// So many bytes, a multiple of 16, become zero. compute_delta may overlap it, also if not_finite is among
// them; cudaMemsetAsync would have to end before.
void clear(void* data, int64_t bytes, const Launch& launch);

void pack_mask(const MaskPacking& packing, const Launch& launch);

// out and lse from what each of `splits` blocks, if there are several, made of its share of the keys:
// averages and lse as Split has them (split.cuh). stride: of a row of averages.
void combine_splits(const ForwardProblem& problem, int splits, float* partial, int64_t stride,
                    const Launch& launch);

}  // namespace flash::cuda

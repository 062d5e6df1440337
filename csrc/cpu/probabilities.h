#pragma once

#include "../problem.h"

namespace flash::cpu {

// exp(score - the row's maximum) of every visible score of a float64 problem, negative where dropout drops
// it, into probabilities [B, H, rows, columns], which is zero on entry. Slow and exact: the plainest reading
// of attention/'s contracts, one score at a time. O(S^2) is what it is asked for.
void probabilities(const ForwardProblem& problem, double* probabilities, int64_t rows, int64_t columns);

}  // namespace flash::cpu

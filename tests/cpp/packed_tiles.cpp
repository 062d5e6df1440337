// Brute force over random packed batches: the slots of PackedTiles cover every row of every sequence, and the
// rows past the last one, exactly once, in tiles that never cross a sequence's end. Offsets that decrease or
// leave the tensor stay inside it. AlignedRows gives every row a place of its own. Prints the number of
// slots; a failure returns 1.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "../../csrc/attention/sequence.h"

using namespace flash;

static bool covers_every_row_once(const std::vector<int32_t>& offsets, int64_t rows, Position tile) {
    const int64_t batch = int64_t(offsets.size()) - 1;
    const PackedTiles tiles{offsets.data(), batch, rows, tile};
    std::vector<int> owner(size_t(rows), -1);
    for (int64_t slot = 0; slot < tiles.slots(); ++slot) {
        const int64_t sequence = tiles.sequence_of_slot(slot);
        const int64_t begin = offsets[size_t(sequence)];
        const int64_t end = sequence < batch ? offsets[size_t(sequence) + 1] : rows;
        const int64_t first = begin + (slot - tiles.first_slot(sequence)) * tile;
        for (int64_t row = first; row < std::min(first + tile, end); ++row) {
            if (owner[size_t(row)] != -1) return false;
            owner[size_t(row)] = int(sequence);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        const auto next = std::upper_bound(offsets.begin(), offsets.end(), int32_t(row));
        if (owner[size_t(row)] != int(next - offsets.begin()) - 1) return false;
    }
    return true;
}

static bool stays_inside(const std::vector<int32_t>& offsets, int64_t rows, Position tile) {
    ForwardProblem problem{};
    problem.batch = int64_t(offsets.size()) - 1;
    problem.rows_q = problem.rows_k = rows;
    problem.cu_seqlens_q = problem.cu_seqlens_k = offsets.data();
    const PackedTiles tiles{offsets.data(), problem.batch, rows, tile};
    for (int64_t slot = 0; slot < tiles.slots(); ++slot) {
        const int64_t entry = tiles.sequence_of_slot(slot);
        if (entry < 0 || entry > problem.batch) return false;
        const Sequence s = entry < problem.batch ? sequence_of(problem, entry) : unowned_rows(problem);
        if (s.first_query_row < 0 || s.seqlen_q < 0 || s.first_query_row + s.seqlen_q > rows) return false;
        if (s.first_key_row < 0 || s.seqlen_k < 0 || s.first_key_row + s.seqlen_k > rows) return false;
    }
    return true;
}

// AlignedRows: rows have places of their own, those of a sequence one after the other from a multiple of 4
// on; whatever the offsets are, inside.
static bool aligns(const std::vector<int32_t>& offsets, int64_t rows, bool ascending) {
    const AlignedRows aligned{offsets.data(), int64_t(offsets.size()) - 1, rows};
    std::vector<int> taken(size_t(aligned.count()));
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t place = aligned.place(row);
        if (place >= aligned.count() || (ascending && (place < 0 || taken[size_t(place)]++))) return false;
        const auto next = std::upper_bound(offsets.begin(), offsets.end(), int32_t(row));
        const int64_t sequence = next - offsets.begin() - 1;
        if (ascending && place != aligned.first(sequence) + row - offsets[size_t(sequence)]) return false;
    }
    for (size_t sequence = 0; sequence < offsets.size(); ++sequence)
        if (aligned.first(int64_t(sequence)) % 4 != 0) return false;
    return true;
}

int main() {
    std::mt19937 random(1);
    const auto draw = [&](int64_t low, int64_t high) {
        return std::uniform_int_distribution<int64_t>(low, high)(random);
    };
    int64_t slots = 0;
    for (int trial = 0; trial < 20000; ++trial) {
        const int64_t batch = draw(1, 12), tile = int64_t(1) << draw(0, 6);
        std::vector<int32_t> offsets(1, 0), wild;
        for (int64_t b = 0; b < batch; ++b)
            offsets.push_back(offsets.back() + int32_t(draw(0, 2) ? draw(0, 3 * tile) : 0));
        const int64_t rows = offsets.back() + (draw(0, 1) ? draw(0, 100) : 0);
        slots += rows / tile + batch + 1;
        for (int64_t b = 0; b <= batch; ++b) wild.push_back(int32_t(draw(-50, rows + 50)));
        if (covers_every_row_once(offsets, rows, tile) && stays_inside(wild, rows, tile) &&
            aligns(offsets, rows, true) && aligns(wild, rows, false))
            continue;
        std::fprintf(stderr, "wrong: %ld rows, tile %ld, offsets", long(rows), long(tile));
        for (const int32_t offset : offsets) std::fprintf(stderr, " %d", offset);
        std::fprintf(stderr, "\n");
        return 1;
    }
    std::printf("%ld slots\n", long(slots));
    return slots > 100000 ? 0 : 1;
}

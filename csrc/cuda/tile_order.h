// In which order blocks take the tiles of one axis. Tiles come first, then heads (of all batch entries), so
// that blocks that run together read the same tiles of the other axis. Where tiles take different times, as
// under a causal mask, `section` heads go together: all their first tiles, which are to be the longest, then
// all their second ones, ... The blocks that run at the end are short then, and the device idles less. The
// last section is two to three times as large, if nothing else is said: how long the device idles at the end
// would otherwise depend on how many blocks of a section it can run at once.
#pragma once

#include "division.h"

namespace flash::cuda {

class TileOrder {
  public:
    // All at least 1. section * tiles below 2^31. last: so many heads at least are in the last section, which
    // is no smaller than others; 0: two sections' worth.
    TileOrder(uint32_t tiles, int64_t heads, int64_t section, int64_t last = 0)
        : section_(uint32_t(section < heads ? section : heads)),
          last_(uint32_t(before_last(heads, section_.divisor, least(section, last)))),
          rest_(uint32_t(heads - int64_t(last_) * section_.divisor)),
          blocks_(tiles * section_.divisor) {}

    uint32_t section() const { return section_.divisor; }
    uint32_t last_section() const { return rest_.divisor; }

    struct Place {
        uint32_t tile, head;
    };

    FLASH_HOST_DEVICE Place operator()(uint32_t index) const {
        uint32_t section = blocks_.quotient(index);
        if (section > last_) section = last_;
        const Division heads = section == last_ ? rest_ : section_;
        const uint32_t within = index - section * blocks_.divisor, tile = heads.quotient(within);
        return {tile, section * section_.divisor + within - tile * heads.divisor};
    }

  private:
    static int64_t least(int64_t section, int64_t last) {
        if (last == 0) return section > 1 ? 2 * section : 1;
        return last > section ? last : section;
    }
    static int64_t before_last(int64_t heads, int64_t section, int64_t last) {
        return heads > last ? (heads - last) / section : 0;
    }

    Division section_;  // heads of a section
    uint32_t last_;     // sections before the last one
    Division rest_;     // heads of the last one
    Division blocks_;   // of a section
};

}  // namespace flash::cuda

// In which order blocks take the tiles of one axis. Tiles come first, then heads (of all batch entries), so
// that blocks that run together read the same tiles of the other axis. Where tiles take different times, as
// under a causal mask, `section` heads go together: all their first tiles, which are to be the longest, then
// all their second ones, ... The blocks that run at the end are short then, and the device idles less.
#pragma once

#include "division.h"

namespace flash::cuda {

class TileOrder {
  public:
    // All at least 1. section * tiles below 2^31.
    TileOrder(uint32_t tiles, int64_t heads, int64_t section)
        : section_(uint32_t(section < heads ? section : heads)),
          rest_(uint32_t(heads % section_.divisor ? heads % section_.divisor : section_.divisor)),
          blocks_(tiles * section_.divisor),
          last_(uint32_t((heads - 1) / section_.divisor)) {}

    uint32_t section() const { return section_.divisor; }

    struct Place {
        uint32_t tile, head;
    };

    FLASH_HOST_DEVICE Place operator()(uint32_t index) const {
        const uint32_t section = blocks_.quotient(index), within = blocks_.remainder(index);
        const Division heads = section == last_ ? rest_ : section_;
        const uint32_t tile = heads.quotient(within);
        return {tile, section * section_.divisor + within - tile * heads.divisor};
    }

  private:
    Division section_, rest_;  // heads of a section, of the last one
    Division blocks_;          // of a section
    uint32_t last_;
};

}  // namespace flash::cuda

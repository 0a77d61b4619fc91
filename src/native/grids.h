// What small codes of some types stand for: sixteen levels of 4 bits, and the grids of the IQ types.
//
// A grid has a row for each index in a block; a row is the codes of 8 (IQ1, IQ2) or 4 (IQ3) inputs, the zero of types.h added, before
// signs are applied. A sign turns a code c into 2 zero - c.
#pragma once
#include <cstdint>

#include "forms.h"

namespace everwarm {

struct Grids {
  uint64_t iq1[4096];  // 8 times the row + 1, then 8 times the row - 1
  uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024];
  uint32_t iq3_xxs[256], iq3_s[512];
};

// The same grids with two bytes for a row: numbers of levels, 2 bits each of eight inputs (IQ2) or 4 bits each of four (IQ3). A grid is
// all first bytes, then all second ones. Small enough for registers: see vbmi.h.
struct SmallGrids {
  alignas(64) uint8_t iq2_xxs[512], iq2_xs[1024], iq2_s[2048], iq3_xxs[512], iq3_s[1024];
};
extern const SmallGrids SMALL_GRIDS;
constexpr uint8_t IQ2_CODES[16] = {72, 89, 107}, IQ3_XXS_CODES[16] = {68, 76, 84, 92, 100, 108, 116, 126},
                  IQ3_S_CODES[16] = {65, 67, 69, 71, 73, 75, 77, 79};
extern const Grids GRIDS;

// What 4 bits stand for, plus zero: the levels of IQ4_NL and IQ4_XS, and twice the float of MXFP4 and NVFP4.
constexpr uint8_t IQ4_CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The rows of the grid of a kind of codes, as integers of 8 or 4 bytes.
template <Codes C>
inline auto grid_rows() {
  if constexpr (C == Codes::iq1) return GRIDS.iq1;
  if constexpr (C == Codes::iq2_xxs) return GRIDS.iq2_xxs;
  if constexpr (C == Codes::iq2_xs) return GRIDS.iq2_xs;
  if constexpr (C == Codes::iq2_s) return GRIDS.iq2_s;
  if constexpr (C == Codes::iq3_xxs) return GRIDS.iq3_xxs;
  if constexpr (C == Codes::iq3_s) return GRIDS.iq3_s;
}

}  // namespace everwarm

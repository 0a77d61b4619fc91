// Forms: how a weight matrix lies in memory for the kernels. One layout for all instruction sets and for any number of rows.
//
// Outputs are taken sixteen at a time (a panel), inputs 32 at a time (a group). The codes of a panel and group are eight vectors of
// 64 bytes, vector j holding inputs 4j..4j+3 of each of the sixteen outputs. They are stored as
//   nibbles  4 vectors: vector j in the low halves, vector j + 4 in the high halves
//   five     nibbles, and a thin plane of one vector: bit j of a byte is the fifth bit of that byte of vector j
//   six      nibbles, and a thin plane of two vectors: bits 2(j mod 4).. of vector j / 4 are the upper bits of vector j
//   bytes    the 8 vectors as they are
// A code c stands for (c - zero) * scale + minimum. Scales, for each of the sixteen outputs, are stored as in the file:
//   half       one f16 per group
//   half_min   an f16 scale and an f16 minimum per group
//   super_min  f16 d and dmin per 256 inputs; u8 s and m per group: scale d * s, minimum -(dmin * m)
//   super      f16 d per 256 inputs; i8 s per 16 inputs: scale d * s
// Nothing is rounded: what is dequantised from a form equals what is dequantised from the file.
#pragma once
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace everwarm {

constexpr int PANEL = 16, GROUP = 32, SUPER = 256;

enum class Codes : int { nibbles, five, six, bytes };
enum class Scales : int { half, half_min, super_min, super };
#define EVERWARM_TYPE(name, floats, bytes) floats,
enum class Floats : int { EVERWARM_FLOAT_TYPES(EVERWARM_TYPE) };
#undef EVERWARM_TYPE

constexpr bool has_minimum(Scales s) { return s == Scales::half_min || s == Scales::super_min; }
constexpr bool is_super(Scales s) { return s == Scales::super_min || s == Scales::super; }

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Outputs in panels of sixteen; the sum of both could pass the greatest int.
constexpr int panels_of(int outputs) { return outputs / PANEL + (outputs % PANEL != 0); }

// Elements of a matrix, the last panel filled up. Below this, no count of bytes of any form passes 64 bits.
constexpr uint64_t MOST_ELEMENTS = uint64_t(1) << 56;
constexpr uint64_t padded_elements(int outputs, int inputs) { return uint64_t(panels_of(outputs)) * PANEL * uint64_t(inputs); }

// A quantised matrix: four planes, one behind the other, each on 64 bytes.
struct Weight {
  Codes codes;
  Scales scales;
  int zero;
  int outputs, inputs;
  const uint8_t* data;

  int panels() const { return panels_of(outputs); }
  int groups() const { return inputs / GROUP; }
  size_t code_bytes() const { return codes == Codes::bytes ? 512 : 256; }                              // per panel and group
  size_t thin_bytes() const { return codes == Codes::five ? 64 : codes == Codes::six ? 128 : 0; }      // per panel and group
  size_t small_bytes() const { return is_super(scales) ? 32 : 0; }  // per panel and group
  size_t halves() const {  // f16 values per panel
    return size_t(is_super(scales) ? inputs / SUPER : groups()) * PANEL * (has_minimum(scales) ? 2 : 1);
  }
  size_t cells() const { return size_t(panels()) * groups(); }
  size_t thin_at() const { return round_up(cells() * code_bytes(), 64); }
  size_t small_at() const { return thin_at() + round_up(cells() * thin_bytes(), 64); }
  size_t half_at() const { return small_at() + round_up(cells() * small_bytes(), 64); }
  size_t bytes() const { return half_at() + round_up(panels() * halves() * 2, 64); }

  const uint8_t* code(int panel, int group) const { return data + (size_t(panel) * groups() + group) * code_bytes(); }
  const uint8_t* thin(int panel, int group) const { return data + thin_at() + (size_t(panel) * groups() + group) * thin_bytes(); }
  const uint8_t* small(int panel, int group) const { return data + small_at() + (size_t(panel) * groups() + group) * small_bytes(); }
  const uint16_t* half(int panel) const { return reinterpret_cast<const uint16_t*>(data + half_at()) + panel * halves(); }
};

// A matrix of floats: [panel][input][sixteen outputs].
struct FloatWeight {
  Floats type;
  int outputs, inputs;
  const uint8_t* data;

  int panels() const { return panels_of(outputs); }
  size_t element() const {
#define EVERWARM_TYPE(name, floats, bytes) \
  if (type == Floats::floats) return bytes;
    EVERWARM_FLOAT_TYPES(EVERWARM_TYPE)
#undef EVERWARM_TYPE
    return 0;
  }
  size_t bytes() const { return round_up(size_t(panels()) * inputs * PANEL * element(), 64); }
};

// Activations, quantised per row and group: x = scale * code, but for an element that is far greater than the others of its group:
// its code is 0, and it is kept as it is, because it would make the scale of the group too coarse for all others.
constexpr float OUTLIER_RATIO = 2.f;  // to the next greatest; about one group in five of a real model has one

struct QuantRows {
  int rows, inputs;
  const int8_t* codes;         // (rows, inputs)
  const float* scale;          // (rows, groups)
  const float* scaled_sum;     // (rows, groups): scale * sum of the group's codes
  const int32_t* sums;         // (rows, 2 * groups): sums of 16 codes
  const float* outlier;        // (rows, groups): its value
  const int32_t* outlier_at;   // (rows, groups): its place in the group, or -1
};

}  // namespace everwarm

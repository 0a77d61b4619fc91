// Forms: how a weight matrix lies in memory for the kernels. One layout for all instruction sets and for any number of rows.
//
// Outputs are taken sixteen at a time (a panel), inputs 32 at a time (a group). The codes of a panel and group are eight vectors of
// 64 bytes, vector j holding inputs 4j..4j+3 of each of the sixteen outputs. They are stored as
//   nibbles  4 vectors: vector j in the low halves, vector j + 4 in the high halves
//   five     nibbles, and a thin plane of one vector: bit j of a byte is the fifth bit of that byte of vector j
//   six      nibbles, and a thin plane of two vectors: bits 2(j mod 4).. of vector j / 4 are the upper bits of vector j
//   bytes    the 8 vectors as they are
//   two      2 vectors: bits 2(j mod 4).. of vector j / 4 are the codes of vector j
//   three    two, and a thin plane of one vector: bit j of a byte is the third bit of that byte of vector j
//   iq4, fp4 nibbles that stand for codes of 8 bits: see LEVELS in grids.h
//   trits    base 3, as TQ1_0 stores it: see trit_place
//   iq1 ...  rows of a grid (grids.h), 8 or 4 inputs each: see GridShape
// A code c stands for (c - zero) * scale + minimum. Scales, for each of the sixteen outputs, are stored as in the file:
//   half       one f16 per group
//   half_min   an f16 scale and an f16 minimum per group
//   super_min  f16 d and dmin per 256 inputs; u8 s and m per group: scale d * s, minimum -(dmin * m)
//   super      f16 d per 256 inputs; i8 s per 16 inputs: scale d * s
//   super_six  the same with s between -32 and 31, so that a code of 3 bits times s has 8 bits
//   super_32   the same with i8 s per group
//   fours_min  f16 d and dmin per 256 inputs; 4 bits s and 4 bits m per 16 inputs: scale d * s, minimum -(dmin * m)
//   odd        f16 d per 256 inputs; 4 bits s per group (two groups share a byte): scale d * (2 s + 1) / steps_of(codes)
//   odd_16     the same with 4 bits s per 16 inputs (the two of a group share a byte)
//   only_super f16 d per 256 inputs
//   power      u8 e per group: scale 2^(e - 128)
//   float8     u8 per 16 inputs: half of an unsigned float with 4 bits of exponent and 3 of mantissa
// Nothing is rounded: what is dequantised from a form equals what is dequantised from the file.
#pragma once
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace everwarm {

constexpr int PANEL = 16, GROUP = 32, SUPER = 256;

enum class Codes : int { nibbles, five, six, bytes, two, three, iq4, fp4, trits, iq1, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s };
enum class Scales : int { half, half_min, super_min, super, super_six, super_32, fours_min, odd, odd_16, only_super, power, float8 };
#define EVERWARM_TYPE(name, floats, bytes) floats,
enum class Floats : int { EVERWARM_FLOAT_TYPES(EVERWARM_TYPE) };
#undef EVERWARM_TYPE

constexpr size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// Kinds of codes with at most 4 bits in the file that take more than shifts to become numbers, and those of fewer bits: low_bit.inl.h.
constexpr bool is_low_bit(Codes c) { return c >= Codes::two; }
constexpr bool is_wide(Codes c) { return c == Codes::bytes || c == Codes::iq4; }  // codes up to 255

// Codes that are rows of a grid. A group has GROUP / row indices for each output; 4 of each of the sixteen outputs are a batch of 64.
// They lie in memory as their low bytes, [batch][64]; a sign bit for each weight, if there are signs, [vector][64 bits]; their upper bits,
// [batch][bit][64 bits].
struct GridShape {
  int row, upper_bits;
  bool signs;
  constexpr int indices() const { return GROUP / row; }
  constexpr int batches() const { return indices() / 4; }
  constexpr int signs_at() const { return batches() * 64; }
  constexpr int upper_at() const { return signs_at() + (signs ? PANEL * GROUP / 8 : 0); }
  constexpr int bytes() const { return upper_at() + batches() * upper_bits * 8; }
};
// Where index `index` of four of output `lane` lies in its batch: four outputs are together in 16 bytes, so that byte-wise interleaving
// within 16 bytes, which is all that processors have, brings rows into the order of outputs.
constexpr int place_in_batch(int index, int lane) { return lane / 4 * 16 + index * 4 + lane % 4; }
constexpr bool is_grid(Codes c) { return c >= Codes::iq1; }
constexpr GridShape grid_shape(Codes c) {
  switch (c) {
    case Codes::iq1: return {8, 4, false};  // the fourth bit is the sign of the shift
    case Codes::iq2_xs: return {8, 1, true};
    case Codes::iq2_s: return {8, 2, true};
    case Codes::iq3_xxs: return {4, 0, true};
    case Codes::iq3_s: return {4, 1, true};
    default: return {8, 0, true};  // iq2_xxs
  }
}

// Steps of codes that make 1: codes of IQ1 are eighths, ...
constexpr int steps_of(Codes c) { return c == Codes::iq3_s ? 1 : c == Codes::iq3_xxs ? 4 : 8; }

// TQ1_0 keeps 256 inputs in 52 bytes, 13 vectors of 64: where vector `vector` of group `group` (of eight) is.
struct TritPlace {
  int vector, digit;
};
constexpr TritPlace trit_place(int group, int vector) {
  if (group < 5) return {vector, group};
  if (group < 7) return {8 + vector % 4, 2 * (group - 5) + vector / 4};
  return vector < 4 ? TritPlace{8 + vector, 4} : TritPlace{12, vector - 4};
}
constexpr uint8_t POWERS_OF_3[5] = {1, 3, 9, 27, 81};
constexpr int trit(uint8_t byte, int digit) { return uint8_t(byte * POWERS_OF_3[digit]) * 3 >> 8; }

// Bytes of a panel and group in each plane.
constexpr int code_bytes(Codes c) {
  if (is_grid(c)) return grid_shape(c).bytes();
  switch (c) {
    case Codes::bytes: return 512;
    case Codes::two:
    case Codes::three: return 128;
    case Codes::trits: return 13 * 64 / (SUPER / GROUP);
    default: return 256;
  }
}
constexpr int thin_bytes(Codes c) { return c == Codes::five || c == Codes::three ? 64 : c == Codes::six ? 128 : 0; }
constexpr int small_bytes(Scales s) {
  switch (s) {
    case Scales::super_min:
    case Scales::super:
    case Scales::super_six:
    case Scales::fours_min:
    case Scales::float8: return 32;
    case Scales::super_32:
    case Scales::odd_16:
    case Scales::power: return 16;
    case Scales::odd: return 8;
    default: return 0;
  }
}

constexpr bool has_minimum(Scales s) { return s == Scales::half_min || s == Scales::super_min || s == Scales::fours_min; }
constexpr bool has_halves(Scales s) { return s != Scales::power && s != Scales::float8; }
constexpr bool is_super(Scales s) { return s != Scales::half && s != Scales::half_min && has_halves(s); }
constexpr int f16_per_block(Scales s) { return has_minimum(s) ? 2 : has_halves(s) ? 1 : 0; }  // of 256 inputs, or of a group

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
  size_t code_bytes() const { return everwarm::code_bytes(codes); }  // per panel and group
  size_t thin_bytes() const { return everwarm::thin_bytes(codes); }
  size_t small_bytes() const { return everwarm::small_bytes(scales); }
  size_t halves() const {  // f16 values per panel
    return size_t(is_super(scales) ? inputs / SUPER : groups()) * PANEL * f16_per_block(scales);
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
  const float* scaled_halves;  // (rows, 2 * groups): scale * sum of 16 codes
  const int32_t* sums;         // (rows, 2 * groups): sums of 16 codes
  const float* outlier;        // (rows, groups): its value
  const int32_t* outlier_at;   // (rows, groups): its place in the group, or -1
};

}  // namespace everwarm

#include "pack.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "grids.h"
#include "low_bit_blocks.h"
#include "simd_portable.h"

namespace everwarm {

namespace {

using blocks::u16;
using portable::half_to_float;

struct Planes {
  uint8_t *code, *thin, *small;
  uint16_t* half;
};

Planes planes_of(const Weight& w, uint8_t* out, int panel) {
  const size_t cell = size_t(panel) * w.groups();
  return {out + cell * w.code_bytes(), out + w.thin_at() + cell * w.thin_bytes(), out + w.small_at() + cell * w.small_bytes(),
          reinterpret_cast<uint16_t*>(out + w.half_at()) + panel * w.halves()};
}

template <class Block>
void read_codes(const uint8_t* block, BlockCodes& out) {
  if constexpr (std::is_base_of_v<blocks::Grid, Block>)
    Block::points(block, out);
  else
    Block::codes(block, out.each);
}

// The sign of input `input` of a group, in the plane of signs of a grid: where its byte and its bit are.
size_t sign_byte(int lane, int input) { return size_t(input / 4) * 8 + lane / 2; }
int sign_bit(int lane, int input) { return 4 * (lane % 2) + input % 4; }

void put_points(const Weight& w, uint8_t* code, int lane, const uint16_t* index, const uint8_t* signs) {
  const GridShape shape = grid_shape(w.codes);
  for (int i = 0; i < shape.indices(); i++) {
    const int at = place_in_batch(i % 4, lane);
    code[i / 4 * 64 + at] = uint8_t(index[i]);
    uint8_t* upper = code + shape.upper_at() + i / 4 * shape.upper_bits * 8;
    for (int bit = 0; bit < shape.upper_bits; bit++) upper[8 * bit + at / 8] |= uint8_t((index[i] >> (8 + bit) & 1) << at % 8);
  }
  if (!shape.signs) return;
  for (int i = 0; i < GROUP; i++) code[shape.signs_at() + sign_byte(lane, i)] |= uint8_t((signs[i / 8] >> i % 8 & 1) << sign_bit(lane, i));
}

void put_trits(uint8_t* code, int lane, const uint8_t* bytes) {
  for (int i = 0; i < 52; i++) code[i / 4 * 64 + 4 * lane + i % 4] = bytes[i];
}

void put_group(const Weight& w, const Planes& to, int group, int lane, const uint8_t* codes) {
  uint8_t* code = to.code + group * w.code_bytes();
  uint8_t* thin = to.thin + group * w.thin_bytes();
  for (int j = 0; j < 8; j++)
    for (int k = 0; k < 4; k++) {
      const uint8_t c = codes[4 * j + k];
      const int at = 4 * lane + k;
      if (w.codes == Codes::bytes) {
        code[64 * j + at] = c;
        continue;
      }
      if (w.codes == Codes::two || w.codes == Codes::three) {
        code[64 * (j / 4) + at] |= uint8_t((c & 3) << 2 * (j % 4));
        if (w.codes == Codes::three) thin[at] |= uint8_t((c >> 2) << j);
        continue;
      }
      code[64 * (j % 4) + at] |= uint8_t((c & 15) << (j / 4 * 4));
      if (w.codes == Codes::five) thin[at] |= uint8_t((c >> 4) << j);
      if (w.codes == Codes::six) thin[64 * (j / 4) + at] |= uint8_t((c >> 4) << 2 * (j % 4));
    }
}

void put_codes(const Weight& w, const Planes& to, int first, int groups, int lane, const BlockCodes& from) {
  if (w.codes == Codes::trits) return put_trits(to.code + first * w.code_bytes(), lane, from.each);
  for (int g = 0; g < groups; g++) {
    if (is_grid(w.codes))
      put_points(w, to.code + (first + g) * w.code_bytes(), lane, from.index + g * grid_shape(w.codes).indices(),
                 from.signs + g * GROUP / 8);
    else
      put_group(w, to, first + g, lane, from.each + g * GROUP);
  }
}

void put_scales(const Weight& w, const Planes& to, int block, int groups, int lane, const BlockScales& from) {
  const int halves = f16_per_block(w.scales), small = int(w.small_bytes()) * groups / PANEL;
  for (int i = 0; i < halves; i++) to.half[(block * halves + i) * PANEL + lane] = from.half[i];
  for (int i = 0; i < small; i++) to.small[(block * small + i) * PANEL + lane] = from.small[i];
}

template <Codes C>
uint8_t grid_code(const Weight& w, const uint8_t* code, int lane, int input) {
  constexpr GridShape shape = grid_shape(C);
  const int i = input / shape.row, at = place_in_batch(i % 4, lane);
  int index = code[i / 4 * 64 + at];
  const uint8_t* upper = code + shape.upper_at() + i / 4 * shape.upper_bits * 8;
  for (int bit = 0; bit < shape.upper_bits; bit++) index |= (upper[8 * bit + at / 8] >> at % 8 & 1) << (8 + bit);
  const auto c = uint8_t(grid_rows<C>()[index] >> 8 * (input % shape.row));
  const bool negative = shape.signs && code[shape.signs_at() + sign_byte(lane, input)] >> sign_bit(lane, input) & 1;
  return negative ? uint8_t(2 * w.zero - c) : c;
}

uint8_t code_at(const Weight& w, int panel, int group, int lane, int input) {
  const int j = input / 4, at = 4 * lane + input % 4;
  const uint8_t* code = w.code(panel, group);
  const auto nibble = [&] { return uint8_t(code[64 * (j % 4) + at] >> (j / 4 * 4) & 15); };
  const auto pair = [&] { return uint8_t(code[64 * (j / 4) + at] >> 2 * (j % 4) & 3); };
  switch (w.codes) {
    case Codes::bytes: return code[64 * j + at];
    case Codes::nibbles: return nibble();
    case Codes::five: return nibble() | uint8_t((w.thin(panel, group)[at] >> j & 1) << 4);
    case Codes::six: return nibble() | uint8_t((w.thin(panel, group)[64 * (j / 4) + at] >> 2 * (j % 4) & 3) << 4);
    case Codes::two: return pair();
    case Codes::three: return pair() | uint8_t((w.thin(panel, group)[at] >> j & 1) << 2);
    case Codes::iq4: return IQ4_CODES[nibble()];
    case Codes::fp4: return FP4_CODES[nibble()];
    case Codes::trits: {
      const auto [vector, digit] = trit_place(group % 8, j);
      return uint8_t(trit(w.code(panel, group / 8 * 8)[64 * vector + at], digit));
    }
    case Codes::iq1: return grid_code<Codes::iq1>(w, code, lane, input);
    case Codes::iq2_xxs: return grid_code<Codes::iq2_xxs>(w, code, lane, input);
    case Codes::iq2_xs: return grid_code<Codes::iq2_xs>(w, code, lane, input);
    case Codes::iq2_s: return grid_code<Codes::iq2_s>(w, code, lane, input);
    case Codes::iq3_xxs: return grid_code<Codes::iq3_xxs>(w, code, lane, input);
    case Codes::iq3_s: return grid_code<Codes::iq3_s>(w, code, lane, input);
  }
  return 0;
}

float power_of_byte(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// A byte of 127 is 0; else the highest bit means nothing.
float half_of_float8(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if (byte == 127) return 0.f;
  return exponent ? std::ldexp(float(8 + mantissa), exponent - 11) : float(mantissa) * 0x1p-10f;
}

struct ScaleAndMinimum {
  float scale, minimum;
};

// Of 16 inputs: the first or second half of a group.
ScaleAndMinimum scale_at(const Weight& w, int panel, int g, int lane, int half) {
  const int super = g / (SUPER / GROUP);
  const uint16_t* f16 = w.half(panel) + lane;
  const uint8_t* small = w.small(panel, g) + lane;
  switch (w.scales) {
    case Scales::half: return {half_to_float(f16[g * PANEL]), 0.f};
    case Scales::half_min: return {half_to_float(f16[g * 2 * PANEL]), half_to_float(f16[g * 2 * PANEL + PANEL])};
    case Scales::super_min:
      return {half_to_float(f16[super * 2 * PANEL]) * small[0], -(half_to_float(f16[super * 2 * PANEL + PANEL]) * small[PANEL])};
    case Scales::super:
    case Scales::super_six: return {half_to_float(f16[super * PANEL]) * static_cast<int8_t>(small[half * PANEL]), 0.f};
    case Scales::super_32: return {half_to_float(f16[super * PANEL]) * static_cast<int8_t>(small[0]), 0.f};
    case Scales::fours_min: {
      const uint8_t both = small[half * PANEL];
      return {half_to_float(f16[super * 2 * PANEL]) * (both & 15), -(half_to_float(f16[super * 2 * PANEL + PANEL]) * (both >> 4))};
    }
    case Scales::odd: {
      const int s = w.small(panel, g / 2 * 2)[lane] >> 4 * (g % 2) & 15;
      return {half_to_float(f16[super * PANEL]) * (float(2 * s + 1) / float(steps_of(w.codes))), 0.f};
    }
    case Scales::odd_16: {
      const int s = small[0] >> 4 * half & 15;
      return {half_to_float(f16[super * PANEL]) * (float(2 * s + 1) / float(steps_of(w.codes))), 0.f};
    }
    case Scales::only_super: return {half_to_float(f16[super * PANEL]), 0.f};
    case Scales::power: return {power_of_byte(small[0]), 0.f};
    case Scales::float8: return {half_of_float8(small[half * PANEL]), 0.f};
  }
  return {};
}

void dequantize_row(const Weight& w, int row, float* out) {
  const int panel = row / PANEL, lane = row % PANEL;
  for (int i = 0; i < w.inputs; i += GROUP / 2) {
    const auto [scale, minimum] = scale_at(w, panel, i / GROUP, lane, i / (GROUP / 2) % 2);
    for (int k = i; k < i + GROUP / 2; k++) {
      const float code = float(int(code_at(w, panel, k / GROUP, lane, k % GROUP)) - w.zero);
      out[k] = has_minimum(w.scales) ? scale * code + minimum : scale * code;
    }
  }
}

}  // namespace

const std::vector<TensorType>& tensor_types() {
  static const std::vector<TensorType> types = {
#define EVERWARM_TYPE(name, code, scale, zero, inputs, bytes) \
  {#name, inputs, bytes, Weight{Codes::code, Scales::scale, zero, 0, 0, nullptr}, {}, read_codes<blocks::name>, blocks::name::scales},
      EVERWARM_QUANTISED_TYPES(EVERWARM_TYPE)
#undef EVERWARM_TYPE
#define EVERWARM_TYPE(name, floats, bytes) {#name, 1, bytes, {}, FloatWeight{Floats::floats, 0, 0, nullptr}, nullptr, nullptr},
          EVERWARM_FLOAT_TYPES(EVERWARM_TYPE)
#undef EVERWARM_TYPE
  };
  return types;
}

void pack(const TensorType& type, const uint8_t* from, const Weight& w, uint8_t* out, Pool& pool) {
  const int per_row = w.inputs / type.block_inputs, groups = type.block_inputs / GROUP;
  const size_t code_plane = w.cells() * w.code_bytes();
  std::memset(out + code_plane, 0, w.bytes() - code_plane);
  pool.run(w.panels(), [&](int panel, int) {
    const Planes to = planes_of(w, out, panel);
    std::memset(to.code, 0, w.groups() * w.code_bytes());
    BlockCodes codes;
    BlockScales scales;
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < w.outputs; lane++) {
      const uint8_t* b = from + size_t(panel * PANEL + lane) * per_row * type.block_bytes;
      for (int block = 0; block < per_row; block++, b += type.block_bytes) {
        type.read_codes(b, codes);
        type.read_scales(b, scales);
        put_codes(w, to, block * groups, groups, lane, codes);
        put_scales(w, to, block, groups, lane, scales);
      }
    }
  });
}

void dequantize_rows(const Weight& w, const int32_t* rows, int count, float* out, Pool& pool) {
  const int step = 16;
  pool.run((count + step - 1) / step, [&](int chunk, int) {
    for (int i = chunk * step; i < count && i < (chunk + 1) * step; i++) dequantize_row(w, rows[i], out + size_t(i) * w.inputs);
  });
}

void pack_floats(const uint8_t* rows, const FloatWeight& w, uint8_t* out, Pool& pool) {
  const size_t e = w.element();
  pool.run(w.panels(), [&](int panel, int) {
    uint8_t* to = out + size_t(panel) * w.inputs * PANEL * e;
    std::memset(to, 0, size_t(w.inputs) * PANEL * e);
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < w.outputs; lane++) {
      const uint8_t* row = rows + size_t(panel * PANEL + lane) * w.inputs * e;
      for (int k = 0; k < w.inputs; k++) std::memcpy(to + (size_t(k) * PANEL + lane) * e, row + k * e, e);
    }
  });
}

void dequantize_float_rows(const FloatWeight& w, const int32_t* rows, int count, float* out, Pool&) {
  const size_t e = w.element();
  for (int i = 0; i < count; i++) {
    const uint8_t* from = w.data + (size_t(rows[i] / PANEL) * w.inputs * PANEL + rows[i] % PANEL) * e;
    for (int k = 0; k < w.inputs; k++) {
      float& x = out[size_t(i) * w.inputs + k];
      const uint8_t* p = from + size_t(k) * PANEL * e;
      if (w.type == Floats::f32) {
        std::memcpy(&x, p, 4);
      } else if (w.type == Floats::f16) {
        x = half_to_float(u16(p));
      } else {
        const uint32_t bits = uint32_t(u16(p)) << 16;
        std::memcpy(&x, &bits, 4);
      }
    }
  }
}

}  // namespace everwarm

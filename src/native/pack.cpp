#include "pack.h"

#include <cstring>

#include "blocks.h"
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
      code[64 * (j % 4) + at] |= uint8_t((c & 15) << (j / 4 * 4));
      if (w.codes == Codes::five) thin[at] |= uint8_t((c >> 4) << j);
      if (w.codes == Codes::six) thin[64 * (j / 4) + at] |= uint8_t((c >> 4) << 2 * (j % 4));
    }
}

void put_scales(const Weight& w, const Planes& to, int block, int lane, const BlockScales& from) {
  const int halves = has_minimum(w.scales) ? 2 : 1, small = is_super(w.scales) ? SUPER / 16 : 0;
  for (int i = 0; i < halves; i++) to.half[(block * halves + i) * PANEL + lane] = from.half[i];
  for (int i = 0; i < small; i++) to.small[(block * small + i) * PANEL + lane] = from.small[i];
}

uint8_t code_at(const Weight& w, int panel, int group, int lane, int input) {
  const int j = input / 4, at = 4 * lane + input % 4;
  const uint8_t* code = w.code(panel, group);
  if (w.codes == Codes::bytes) return code[64 * j + at];
  uint8_t c = code[64 * (j % 4) + at] >> (j / 4 * 4) & 15;
  if (w.codes == Codes::five) c |= uint8_t((w.thin(panel, group)[at] >> j & 1) << 4);
  if (w.codes == Codes::six) c |= uint8_t((w.thin(panel, group)[64 * (j / 4) + at] >> 2 * (j % 4) & 3) << 4);
  return c;
}

void dequantize_row(const Weight& w, int row, float* out) {
  const int panel = row / PANEL, lane = row % PANEL;
  const uint16_t* half = w.half(panel);
  for (int g = 0; g < w.groups(); g++)
    for (int i = 0; i < GROUP; i++) {
      const float code = float(int(code_at(w, panel, g, lane, i)) - w.zero);
      const int super = g / (SUPER / GROUP);
      float& x = out[g * GROUP + i];
      switch (w.scales) {
        case Scales::half: x = half_to_float(half[g * PANEL + lane]) * code; break;
        case Scales::half_min:
          x = half_to_float(half[g * 2 * PANEL + lane]) * code + half_to_float(half[g * 2 * PANEL + PANEL + lane]);
          break;
        case Scales::super_min: {
          const uint8_t* small = w.small(panel, g) + lane;
          const float scale = half_to_float(half[super * 2 * PANEL + lane]) * small[0];
          const float minimum = half_to_float(half[super * 2 * PANEL + PANEL + lane]) * small[PANEL];
          x = scale * code - minimum;
          break;
        }
        case Scales::super: {
          const auto small = static_cast<int8_t>(w.small(panel, g)[i / 16 * PANEL + lane]);
          x = half_to_float(half[super * PANEL + lane]) * small * code;
          break;
        }
      }
    }
}

}  // namespace

const std::vector<TensorType>& tensor_types() {
  static const std::vector<TensorType> types = {
#define EVERWARM_TYPE(name, code, scale, zero, inputs, bytes) \
  {#name, inputs, bytes, Weight{Codes::code, Scales::scale, zero, 0, 0, nullptr}, {}, blocks::name::codes, blocks::name::scales},
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
    uint8_t codes[SUPER];
    BlockScales scales;
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < w.outputs; lane++) {
      const uint8_t* b = from + size_t(panel * PANEL + lane) * per_row * type.block_bytes;
      for (int block = 0; block < per_row; block++, b += type.block_bytes) {
        type.read_codes(b, codes);
        type.read_scales(b, scales);
        for (int g = 0; g < groups; g++) put_group(w, to, block * groups + g, lane, codes + g * GROUP);
        put_scales(w, to, block, lane, scales);
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

#include "pack.h"

#include <cstring>

#include "simd_portable.h"

namespace everwarm {

namespace {

using portable::half_to_float;

uint16_t u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// What a GGUF type is made of. A unit is a group of 32 inputs, or a super-block of 256.
struct Type {
  const char* name;
  Codes codes;
  Scales scales;
  int zero;
  int unit_inputs, unit_bytes;
};

constexpr Type TYPES[] = {
    {"Q4_0", Codes::nibbles, Scales::half, 8, 32, 18},     {"Q4_1", Codes::nibbles, Scales::half_min, 0, 32, 20},
    {"Q5_0", Codes::five, Scales::half, 16, 32, 22},       {"Q5_1", Codes::five, Scales::half_min, 0, 32, 24},
    {"Q8_0", Codes::bytes, Scales::half, 128, 32, 34},     {"Q4_K", Codes::nibbles, Scales::super_min, 0, 256, 144},
    {"Q5_K", Codes::five, Scales::super_min, 0, 256, 176}, {"Q6_K", Codes::six, Scales::super, 32, 256, 210},
};

const Type* find(const std::string& name) {
  for (const Type& type : TYPES)
    if (name == type.name) return &type;
  return nullptr;
}

void nibbles(const uint8_t* qs, int bytes, uint8_t* codes) {  // low halves first, then high halves
  for (int i = 0; i < bytes; i++) codes[i] = qs[i] & 15, codes[bytes + i] = qs[i] >> 4;
}

// The codes of one unit, in the order of its inputs.
void unit_codes(const Type& type, const uint8_t* b, uint8_t* codes) {
  const std::string name = type.name;
  if (name == "Q4_0") return nibbles(b + 2, 16, codes);
  if (name == "Q4_1") return nibbles(b + 4, 16, codes);
  if (name == "Q5_0" || name == "Q5_1") {
    const uint8_t* qh = b + (name == "Q5_0" ? 2 : 4);
    nibbles(qh + 4, 16, codes);
    for (int i = 0; i < 32; i++) codes[i] |= uint8_t((qh[i / 8] >> i % 8 & 1) << 4);
  } else if (name == "Q8_0") {
    for (int i = 0; i < 32; i++) codes[i] = b[2 + i] ^ 0x80;  // two's complement to excess 128
  } else if (name == "Q4_K" || name == "Q5_K") {
    const uint8_t* qs = b + (name == "Q4_K" ? 16 : 48);
    for (int j = 0; j < 4; j++) nibbles(qs + 32 * j, 32, codes + 64 * j);
    if (name == "Q5_K")
      for (int i = 0; i < 256; i++) codes[i] |= uint8_t((b[16 + i % 32] >> i / 32 & 1) << 4);
  } else {  // Q6_K
    for (int n = 0; n < 2; n++)
      for (int l = 0; l < 32; l++) {
        const uint8_t low = b[64 * n + l], next = b[64 * n + l + 32], high = b[128 + 32 * n + l];
        uint8_t* c = codes + 128 * n + l;
        c[0] = (low & 15) | (high & 3) << 4, c[32] = (next & 15) | (high >> 2 & 3) << 4;
        c[64] = low >> 4 | (high >> 4 & 3) << 4, c[96] = next >> 4 | (high >> 6 & 3) << 4;
      }
  }
}

// 6-bit scale and minimum j of a Q4_K or Q5_K block.
void k_scale(const uint8_t* s, int j, uint8_t& scale, uint8_t& minimum) {
  if (j < 4) {
    scale = s[j] & 63, minimum = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
  }
}

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

void put_scales(const Type& type, const Weight& w, const Planes& to, int unit, int lane, const uint8_t* b) {
  switch (w.scales) {
    case Scales::half: to.half[unit * PANEL + lane] = u16(b); break;
    case Scales::half_min:
      to.half[unit * 2 * PANEL + lane] = u16(b);
      to.half[unit * 2 * PANEL + PANEL + lane] = u16(b + 2);
      break;
    case Scales::super_min:
      to.half[unit * 2 * PANEL + lane] = u16(b);
      to.half[unit * 2 * PANEL + PANEL + lane] = u16(b + 2);
      for (int j = 0; j < 8; j++) {
        uint8_t* small = to.small + (unit * 8 + j) * 2 * PANEL + lane;
        k_scale(b + 4, j, small[0], small[PANEL]);
      }
      break;
    case Scales::super:
      to.half[unit * PANEL + lane] = u16(b + type.unit_bytes - 2);
      for (int j = 0; j < 16; j++) to.small[(unit * 16 + j) * PANEL + lane] = b[192 + j];
      break;
  }
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

bool form_of(const std::string& type, int outputs, int inputs, Weight& form) {
  const Type* t = find(type);
  if (!t || inputs % t->unit_inputs) return false;
  form = {t->codes, t->scales, t->zero, outputs, inputs, nullptr};
  return true;
}

size_t block_row_bytes(const std::string& type, int inputs) {
  const Type& t = *find(type);
  return size_t(inputs) / t.unit_inputs * t.unit_bytes;
}

void pack(const std::string& type, const uint8_t* blocks, const Weight& w, uint8_t* out, Pool& pool) {
  const Type& t = *find(type);
  const int units = w.inputs / t.unit_inputs;
  const size_t codes = w.cells() * w.code_bytes();
  std::memset(out + codes, 0, w.bytes() - codes);
  pool.run(w.panels(), [&](int panel, int) {
    const Planes to = planes_of(w, out, panel);
    std::memset(to.code, 0, w.groups() * w.code_bytes());
    uint8_t codes[SUPER];
    for (int lane = 0; lane < PANEL && panel * PANEL + lane < w.outputs; lane++) {
      const uint8_t* b = blocks + size_t(panel * PANEL + lane) * units * t.unit_bytes;
      for (int u = 0; u < units; u++, b += t.unit_bytes) {
        unit_codes(t, b, codes);
        const int per_unit = t.unit_inputs / GROUP;
        for (int g = 0; g < per_unit; g++) put_group(w, to, u * per_unit + g, lane, codes + g * GROUP);
        put_scales(t, w, to, u, lane, b);
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

void pack_floats(Floats, const uint8_t* rows, const FloatWeight& w, uint8_t* out, Pool& pool) {
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

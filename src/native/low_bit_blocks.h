// How blocks hold their codes and scales, continued: types of fewer than 4 bits, and types whose codes stand for uneven levels.
#pragma once
#include "blocks.h"

namespace everwarm::blocks {

inline uint32_t u32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

inline int nibble(const uint8_t* p, int i) { return p[i / 2] >> 4 * (i % 2) & 15; }

struct IQ4_NL : Q4_0 {};

struct IQ4_XS {
  static void codes(const uint8_t* b, uint8_t* out) {
    for (int g = 0; g < 8; g++) nibbles(b + 8 + 16 * g, 16, out + 32 * g);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    for (int g = 0; g < 8; g++) out.small[g] = uint8_t((nibble(b + 4, g) | (u16(b + 2) >> 2 * g & 3) << 4) - 32);
  }
};

struct MXFP4 {
  static void codes(const uint8_t* b, uint8_t* out) { nibbles(b + 1, 16, out); }
  static void scales(const uint8_t* b, BlockScales& out) { out.small[0] = b[0]; }
};

struct NVFP4 {
  static void codes(const uint8_t* b, uint8_t* out) {
    for (int i = 0; i < 4; i++) nibbles(b + 4 + 8 * i, 8, out + 16 * i);
  }
  static void scales(const uint8_t* b, BlockScales& out) { std::memcpy(out.small, b, 4); }
};

// Two bits of each of 256 inputs: a run of 32 bytes holds its first 32 inputs in the lowest bits, the next 32 in the bits above, ...
inline void two_bits(const uint8_t* qs, uint8_t* codes) {
  for (int i = 0; i < 256; i++) codes[i] = qs[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
}

struct Q2_K {
  static void codes(const uint8_t* b, uint8_t* out) { two_bits(b + 16, out); }
  static void scales(const uint8_t* b, BlockScales& out) {
    std::memcpy(out.small, b, 16);  // the scale in the low half of a byte, the minimum in the high one
    out.half[0] = u16(b + 80), out.half[1] = u16(b + 82);
  }
};

struct Q3_K {
  static void codes(const uint8_t* b, uint8_t* out) {
    two_bits(b + 32, out);
    for (int i = 0; i < 256; i++) out[i] |= uint8_t((b[i % 32] >> i / 32 & 1) << 2);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    const uint8_t *low = b + 96, *high = b + 104;
    for (int i = 0; i < 16; i++) out.small[i] = uint8_t((low[i % 8] >> i / 8 * 4 & 15) | (high[i % 4] >> i / 4 * 2 & 3) << 4) - 32;
    out.half[0] = u16(b + 108);
  }
};

struct TQ1_0 {
  static void codes(const uint8_t* b, uint8_t* out) { std::memcpy(out, b, 52); }  // as they are: see trit_place
  static void scales(const uint8_t* b, BlockScales& out) { out.half[0] = u16(b + 52); }
};

struct TQ2_0 {
  static void codes(const uint8_t* b, uint8_t* out) { two_bits(b, out); }
  static void scales(const uint8_t* b, BlockScales& out) { out.half[0] = u16(b + 64); }
};

struct Grid {};

// Seven of eight signs are stored: the eighth makes the number of minus signs even.
inline uint8_t even_signs(int seven) { return uint8_t(seven | __builtin_parity(unsigned(seven)) << 7); }

// Four times 7 signs and a 4-bit scale in each of eight words, `stride` bytes apart.
inline void signs_of_words(const uint8_t* words, int stride, uint8_t* signs) {
  for (int i = 0; i < 32; i++) signs[i] = even_signs(u32(words + i / 4 * stride) >> 7 * (i % 4) & 127);
}
inline void scales_of_words(const uint8_t* words, int stride, uint8_t* small) {
  for (int i = 0; i < 4; i++) small[i] = uint8_t(u32(words + 2 * i * stride) >> 28 | u32(words + (2 * i + 1) * stride) >> 28 << 4);
}

struct IQ2_XXS : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 32; i++) out.index[i] = b[2 + i / 4 * 8 + i % 4];
    signs_of_words(b + 6, 8, out.signs);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    scales_of_words(b + 6, 8, out.small);
  }
};

struct IQ2_XS : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 32; i++) {
      const uint16_t both = u16(b + 2 + 2 * i);
      out.index[i] = both & 511, out.signs[i] = even_signs(both >> 9);
    }
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    std::memcpy(out.small, b + 66, 8);
  }
};

struct IQ2_S : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 32; i++) out.index[i] = uint16_t(b[2 + i] | (b[66 + i / 4] >> 2 * (i % 4) & 3) << 8);
    std::memcpy(out.signs, b + 34, 32);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    std::memcpy(out.small, b + 74, 8);
  }
};

struct IQ3_XXS : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 64; i++) out.index[i] = b[2 + i];
    signs_of_words(b + 66, 4, out.signs);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    scales_of_words(b + 66, 4, out.small);
  }
};

struct IQ3_S : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 64; i++) out.index[i] = uint16_t(b[2 + i] | (b[66 + i / 8] >> i % 8 & 1) << 8);
    std::memcpy(out.signs, b + 74, 32);
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    std::memcpy(out.small, b + 106, 4);
  }
};

// Bit 11 of an index of IQ1 says that the row is shifted down, not up.
struct IQ1_S : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 32; i++) {
      const uint16_t high = u16(b + 34 + i / 4 * 2);
      out.index[i] = uint16_t(b[2 + i] | (high >> 3 * (i % 4) & 7) << 8 | high >> 15 << 11);
    }
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    out.half[0] = u16(b);
    const auto scale = [b](int g) { return u16(b + 34 + 2 * g) >> 12 & 7; };
    for (int i = 0; i < 4; i++) out.small[i] = uint8_t(scale(2 * i) | scale(2 * i + 1) << 4);
  }
};

struct IQ1_M : Grid {
  static void points(const uint8_t* b, BlockCodes& out) {
    for (int i = 0; i < 32; i++) out.index[i] = uint16_t(b[i] | nibble(b + 32, i) << 8);
  }
  // Four words, each of four 3-bit scales and a nibble of the block's f16.
  static void scales(const uint8_t* b, BlockScales& out) {
    const auto word = [b](int i) { return u16(b + 48 + 2 * i); };
    const auto scale = [&](int i) { return word(i / 4) >> 3 * (i % 4) & 7; };
    out.half[0] = uint16_t(word(0) >> 12 | word(1) >> 12 << 4 | word(2) >> 12 << 8 | word(3) >> 12 << 12);
    for (int i = 0; i < 8; i++) out.small[i] = uint8_t(scale(2 * i) | scale(2 * i + 1) << 4);
  }
};

}  // namespace everwarm::blocks

// How the blocks of a GGUF file hold their codes and scales: a struct for each quantised type of types.h; here those of 4 bits and more
// that are evenly spaced, in low_bit_blocks.h the others.
//   codes   the codes of the block's inputs, in their order
//   points  instead of codes, for types with a grid: indices of its rows and a sign bit for each input
//   scales  f16 scale and, if there is one, f16 minimum; and small numbers as forms.h wants them, in the order of the inputs: for Q4_K,
//           say, scale and minimum of each group of 32 inputs
#pragma once
#include <cstdint>
#include <cstring>

#include "forms.h"

namespace everwarm {

struct BlockCodes {
  uint8_t each[SUPER];
  uint16_t index[SUPER / 4];
  uint8_t signs[SUPER / 8];  // bit i % 8 of byte i / 8: input i is negative
};

struct BlockScales {
  uint16_t half[2];
  uint8_t small[SUPER / 16];
};

namespace blocks {

inline uint16_t u16(const uint8_t* p) {
  uint16_t v;
  std::memcpy(&v, p, 2);
  return v;
}

// Each byte holds two codes: the low halves of all bytes come first, then the high halves.
inline void nibbles(const uint8_t* qs, int bytes, uint8_t* codes) {
  for (int i = 0; i < bytes; i++) codes[i] = qs[i] & 15, codes[bytes + i] = qs[i] >> 4;
}

inline void super_nibbles(const uint8_t* qs, uint8_t* codes) {
  for (int j = 0; j < 4; j++) nibbles(qs + 32 * j, 32, codes + 64 * j);
}

// The fifth bits of 32 codes, in 4 bytes.
inline void fifth_bits(const uint8_t* qh, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= uint8_t((qh[i / 8] >> i % 8 & 1) << 4);
}

struct Half {
  static void scales(const uint8_t* b, BlockScales& out) { out.half[0] = u16(b); }
};

struct HalfAndMinimum {
  static void scales(const uint8_t* b, BlockScales& out) { out.half[0] = u16(b), out.half[1] = u16(b + 2); }
};

// f16 scale and minimum of the super-block, then 6-bit scales and minima of its eight groups in 12 bytes.
struct SixBitScales {
  static void scales(const uint8_t* b, BlockScales& out) {
    HalfAndMinimum::scales(b, out);
    const uint8_t* s = b + 4;
    for (int j = 0; j < 8; j++) {
      uint8_t &scale = out.small[2 * j], &minimum = out.small[2 * j + 1];
      if (j < 4) {
        scale = s[j] & 63, minimum = s[j + 4] & 63;
      } else {
        scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4;
      }
    }
  }
};

struct Q4_0 : Half {
  static void codes(const uint8_t* b, uint8_t* out) { nibbles(b + 2, 16, out); }
};

struct Q4_1 : HalfAndMinimum {
  static void codes(const uint8_t* b, uint8_t* out) { nibbles(b + 4, 16, out); }
};

struct Q5_0 : Half {
  static void codes(const uint8_t* b, uint8_t* out) { nibbles(b + 6, 16, out), fifth_bits(b + 2, out); }
};

struct Q5_1 : HalfAndMinimum {
  static void codes(const uint8_t* b, uint8_t* out) { nibbles(b + 8, 16, out), fifth_bits(b + 4, out); }
};

struct Q8_0 : Half {
  static void codes(const uint8_t* b, uint8_t* out) {
    for (int i = 0; i < 32; i++) out[i] = b[2 + i] ^ 0x80;  // two's complement to excess 128
  }
};

struct Q4_K : SixBitScales {
  static void codes(const uint8_t* b, uint8_t* out) { super_nibbles(b + 16, out); }
};

struct Q5_K : SixBitScales {
  static void codes(const uint8_t* b, uint8_t* out) {
    super_nibbles(b + 48, out);
    for (int i = 0; i < 256; i++) out[i] |= uint8_t((b[16 + i % 32] >> i / 32 & 1) << 4);
  }
};

struct Q6_K {
  static void codes(const uint8_t* b, uint8_t* out) {
    for (int n = 0; n < 2; n++)
      for (int l = 0; l < 32; l++) {
        const uint8_t low = b[64 * n + l], next = b[64 * n + l + 32], high = b[128 + 32 * n + l];
        uint8_t* c = out + 128 * n + l;
        c[0] = (low & 15) | (high & 3) << 4, c[32] = (next & 15) | (high >> 2 & 3) << 4;
        c[64] = low >> 4 | (high >> 4 & 3) << 4, c[96] = next >> 4 | (high >> 6 & 3) << 4;
      }
  }
  static void scales(const uint8_t* b, BlockScales& out) {
    std::memcpy(out.small, b + 192, 16);
    out.half[0] = u16(b + 208);
  }
};

}  // namespace blocks
}  // namespace everwarm

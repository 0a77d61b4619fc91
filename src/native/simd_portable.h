// Sixteen lanes of f32 / i32 in plain C++: loops that a compiler can vectorise. Same bits as the other simd_*.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace everwarm::portable {

// clang-format off: one operation per line, as in the other simd_*.h
constexpr int LANES = 16;
struct F32 { float v[LANES]; };
struct I32 { int32_t v[LANES]; };
struct Bytes { uint8_t v[64]; };

#define EACH for (int i = 0; i < LANES; i++)
inline F32 load(const float* p) { F32 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float* p, F32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F32 splat(float x) { F32 r; EACH r.v[i] = x; return r; }
inline F32 add(F32 a, F32 b) { EACH a.v[i] += b.v[i]; return a; }
inline F32 sub(F32 a, F32 b) { EACH a.v[i] -= b.v[i]; return a; }
inline F32 mul(F32 a, F32 b) { EACH a.v[i] *= b.v[i]; return a; }
inline F32 div(F32 a, F32 b) { EACH a.v[i] /= b.v[i]; return a; }
inline F32 fma(F32 a, F32 b, F32 c) { EACH c.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return c; }
inline F32 max(F32 a, F32 b) { EACH a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F32 min(F32 a, F32 b) { EACH a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F32 abs(F32 a) { EACH a.v[i] = std::fabs(a.v[i]); return a; }
inline I32 isplat(int32_t x) { I32 r; EACH r.v[i] = x; return r; }
inline I32 iadd(I32 a, I32 b) { EACH a.v[i] += b.v[i]; return a; }
inline F32 to_f32(I32 a) { F32 r; EACH r.v[i] = float(a.v[i]); return r; }
inline I32 round(F32 a) {
  I32 r;
  EACH {  // what cvtps2dq does: to nearest even, and the least integer for what does not fit
    const float x = std::nearbyint(a.v[i]);
    r.v[i] = x >= -2147483648.f && x < 2147483648.f ? int32_t(x) : INT32_MIN;
  }
  return r;
}
inline F32 scale_by_power(F32 a, I32 n) {
  EACH {
    uint32_t bits;
    std::memcpy(&bits, &a.v[i], 4);
    bits += uint32_t(n.v[i]) << 23;
    std::memcpy(&a.v[i], &bits, 4);
  }
  return a;
}
inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (fraction ? 0x400000 | fraction << 13 : 0);
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    const float x = float(fraction) * 0x1p-24f;
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return sign | 0x7c00 | (bits > 0x7f800000 ? uint16_t(0x200 | (bits >> 13 & 0x3ff)) : 0);
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to infinity
  if (bits < 0x38800000) {                       // subnormal or zero: let an addition round
    float x;
    std::memcpy(&x, &bits, 4);
    x += 0.5f;
    std::memcpy(&bits, &x, 4);
    return sign | uint16_t(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1) - (112u << 23);
  return sign | uint16_t(bits >> 13);
}
inline F32 keep_if_at_least(F32 a, F32 x, float limit) { EACH a.v[i] = x.v[i] >= limit ? a.v[i] : 0.f; return a; }
inline F32 zero_where_equal(F32 a, float x) { EACH a.v[i] = a.v[i] != x ? a.v[i] : 0.f; return a; }
inline float reduce_add(F32 a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a.v[i] += a.v[i + n];
  return a.v[0];
}
inline float reduce_max(F32 a) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) a.v[i] = a.v[i] > a.v[i + n] ? a.v[i] : a.v[i + n];
  return a.v[0];
}
inline F32 load_f16(const uint16_t* p) { F32 r; EACH r.v[i] = half_to_float(p[i]); return r; }
inline F32 load_bf16(const uint16_t* p) {
  F32 r;
  EACH {
    const uint32_t bits = uint32_t(p[i]) << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline void store_f16(uint16_t* p, F32 a) { EACH p[i] = float_to_half(a.v[i]); }
inline F32 load_i8(const int8_t* p) { F32 r; EACH r.v[i] = p[i]; return r; }
inline F32 load_u8(const uint8_t* p) { F32 r; EACH r.v[i] = p[i]; return r; }
inline F32 load_low_nibbles(const uint8_t* p) { F32 r; EACH r.v[i] = p[i] & 15; return r; }
inline F32 load_high_nibbles(const uint8_t* p) { F32 r; EACH r.v[i] = p[i] >> 4; return r; }
inline F32 replace_where(F32 a, const uint8_t* ids, int id, const uint16_t* values) {
  EACH if (ids[i] == id) a.v[i] = half_to_float(values[i]);
  return a;
}
inline F32 splat_f16(uint16_t h) { return splat(half_to_float(h)); }
inline void store_i8(int8_t* p, I32 a) { EACH p[i] = int8_t(a.v[i] < -128 ? -128 : a.v[i] > 127 ? 127 : a.v[i]); }

inline Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 64); return r; }
inline Bytes hold(Bytes a) { return a; }
inline void store_bytes(uint8_t* p, Bytes a) { std::memcpy(p, a.v, 64); }
inline Bytes low_nibbles(Bytes a) { for (auto& b : a.v) b &= 15; return a; }
inline Bytes high_nibbles(Bytes a) { for (auto& b : a.v) b >>= 4; return a; }
template <int J, int AT = 4>
inline void add_bit(Bytes& code, Bytes plane) {
  for (int i = 0; i < 64; i++) code.v[i] |= uint8_t((plane.v[i] >> J & 1) << AT);
}
template <int J>
inline void add_pair(Bytes& code, Bytes plane) {
  for (int i = 0; i < 64; i++) code.v[i] |= uint8_t((plane.v[i] >> 2 * J & 3) << 4);
}
template <int J>
inline Bytes pair_of_bits(Bytes plane) { for (auto& b : plane.v) b = b >> 2 * J & 3; return plane; }
inline Bytes load_sixteen(const uint8_t* p) { Bytes r; for (int i = 0; i < 64; i++) r.v[i] = p[i % 16]; return r; }
inline Bytes look_up(Bytes sixteen, Bytes a) { for (auto& b : a.v) b = sixteen.v[b]; return a; }
inline I32 iload_i8(const int8_t* p) { I32 r; EACH r.v[i] = p[i]; return r; }
inline I32 iload_low_nibbles(const uint8_t* p) { I32 r; EACH r.v[i] = p[i] & 15; return r; }
inline I32 imul(I32 a, I32 b) { EACH a.v[i] *= b.v[i]; return a; }
inline Bytes scale_codes(Bytes codes, I32 scale, int zero, int to) {
  for (int i = 0; i < 64; i++) codes.v[i] = uint8_t((codes.v[i] - zero) * scale.v[i / 4] + to);
  return codes;
}
inline Bytes reflect_where(Bytes a, const uint8_t* bits, int twice) {
  for (int i = 0; i < 64; i++) a.v[i] = bits[i / 8] >> i % 8 & 1 ? uint8_t(twice - a.v[i]) : a.v[i];
  return a;
}
template <int UPPER>
inline void join_indices(const uint8_t* low, const uint8_t* upper, uint16_t* out) {
  for (int i = 0; i < 64; i++) {
    out[i] = low[i];
    for (int b = 0; b < UPPER; b++) out[i] |= uint16_t((upper[8 * b + i / 8] >> i % 8 & 1) << (8 + b));
  }
}
template <class Index>
inline Bytes rows_of_four(const uint32_t* rows, Index&& index) {
  Bytes r;
  EACH std::memcpy(r.v + 4 * i, rows + index(i), 4);
  return r;
}
template <class Index>
inline void rows_of_eight(const uint64_t* rows, Index&& index, Bytes& first, Bytes& last) {
  EACH {
    const uint64_t row = rows[index(i)];
    const uint32_t low = uint32_t(row), high = uint32_t(row >> 32);
    std::memcpy(first.v + 4 * i, &low, 4), std::memcpy(last.v + 4 * i, &high, 4);
  }
}
inline F32 load_power(const uint8_t* p) {
  F32 r;
  EACH {
    const uint32_t bits = p[i] < 2 ? 0x00200000u << p[i] : uint32_t(p[i] - 1) << 23;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline F32 load_float8(const uint8_t* p) {
  F32 r;
  EACH {
    const uint32_t bits = p[i] == 127 ? 0 : uint32_t(p[i] & 127) << 20;
    std::memcpy(&r.v[i], &bits, 4);
    r.v[i] *= 0x1p119f;
  }
  return r;
}
inline I32 field(Bytes a, int bit, int mask) { I32 r; EACH r.v[i] = a.v[4 * i + bit / 8] >> bit % 8 & mask; return r; }
inline Bytes splat_quad(const int8_t* p) { Bytes r; EACH std::memcpy(r.v + 4 * i, p, 4); return r; }
inline I32 dot(I32 acc, Bytes codes, Bytes x) {
  EACH for (int k = 0; k < 4; k++) acc.v[i] += int32_t(codes.v[4 * i + k]) * int8_t(x.v[4 * i + k]);
  return acc;
}
inline I32 dot_wide(I32 acc, Bytes codes, Bytes x) { return dot(acc, codes, x); }
constexpr bool WIDE_DOT_IS_CENTRED = false;
inline I32 iload(const int32_t* p) { I32 r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void istore(int32_t* p, I32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store_i16(int16_t* p, I32 a) { EACH p[i] = int16_t(a.v[i] < -32768 ? -32768 : a.v[i] > 32767 ? 32767 : a.v[i]); }
inline Bytes pairs(I32 first, I32 second) {
  Bytes r;
  EACH {
    const int16_t two[2] = {int16_t(first.v[i]), int16_t(second.v[i])};
    std::memcpy(r.v + 4 * i, two, 4);
  }
  return r;
}
inline I32 dot_pairs(I32 acc, Bytes a, Bytes b) {
  int16_t x[2 * LANES], y[2 * LANES];
  std::memcpy(x, a.v, sizeof x), std::memcpy(y, b.v, sizeof y);
  EACH acc.v[i] = int32_t(uint32_t(acc.v[i]) + uint32_t(int32_t(x[2 * i]) * y[2 * i]) + uint32_t(int32_t(x[2 * i + 1]) * y[2 * i + 1]));
  return acc;
}
#undef EACH

// Only vbmi.h has them.
constexpr bool fast_grids() { return false; }
template <auto CODES>
inline void fast_grid_codes(const uint8_t*, uint8_t*) {}

constexpr int ATTENTION_ROWS = 2;  // x 4 vectors
constexpr int TILE_ROWS = 2;
constexpr int PACKED_TILE = 4;
// clang-format on

// Eight rows of eight words of 64 bits become columns; in each word the two numbers of 16 bits in the middle change places.
inline void turn_square(const uint8_t* in, size_t in_stride, uint8_t* out, size_t out_stride) {
  for (int y = 0; y < 8; y++)
    for (int x = 0; x < 8; x++) {
      uint64_t v;
      std::memcpy(&v, in + y * in_stride + 8 * x, 8);
      v = (v & 0xffff00000000ffffull) | (v >> 16 & 0x00000000ffff0000ull) | (v << 16 & 0x0000ffff00000000ull);
      std::memcpy(out + x * out_stride + 8 * y, &v, 8);
    }
}

}  // namespace everwarm::portable

// Sixteen lanes of f32 / i32 with AVX-512 (F, BW, VL, VNNI). Same operations, same order, same bits as the other simd_*.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

#include "vbmi.h"

namespace everwarm::avx512 {

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct Bytes {
  __m512i v;
};  // 64 bytes: four consecutive inputs for each of sixteen outputs

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 div(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }  // a * b + c, rounded once
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline I32 isplat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 iadd(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 round(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline F32 scale_by_power(F32 a, I32 n) {                      // a * 2^n
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
inline F32 keep_if_at_least(F32 a, F32 x, float limit) {  // a where x >= limit, else 0
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_GE_OQ), a.v)};
}
inline F32 zero_where_equal(F32 a, float x) { return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(x), _CMP_NEQ_UQ), a.v)}; }
// All lanes, in a fixed order: i and i + 8, then i and i + 4, + 2, + 1.
inline __m256 halves(__m512 v, __m256& high) {
  high = _mm512_extractf32x8_ps(v, 1);
  return _mm512_castps512_ps256(v);
}
inline float reduce_add(F32 a) {
  __m256 high;
  const __m256 low = halves(a.v, high), eight = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32 a) {
  __m256 high;
  const __m256 low = halves(a.v, high), eight = _mm256_max_ps(low, high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline F32 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline F32 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void store_f16(uint16_t* p, F32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
inline F32 load_i8(const int8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F32 load_u8(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))}; }
inline F32 load_low_nibbles(const uint8_t* p) {  // of sixteen bytes
  return {_mm512_cvtepi32_ps(_mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), _mm512_set1_epi32(15)))};
}
inline F32 load_high_nibbles(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), 4))};
}
// a, but the f16 `values` in the lanes where `ids` is `id`.
inline F32 replace_where(F32 a, const uint8_t* ids, int id, const uint16_t* values) {
  const __mmask16 mask = _mm_cmpeq_epi8_mask(_mm_loadu_si128((const __m128i*)ids), _mm_set1_epi8(char(id)));
  if (!mask) return a;
  return {_mm512_mask_cvtph_ps(a.v, mask, _mm256_loadu_si256((const __m256i*)values))};
}
inline F32 splat_f16(uint16_t h) { return {_mm512_set1_ps(_cvtsh_ss(h))}; }
inline void store_i8(int8_t* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a.v)); }

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// The same, in a register: GCC would read memory again for each use, and a core has one load of 64 bytes per cycle.
inline Bytes hold(Bytes a) {
  asm("" : "+v"(a.v));
  return a;
}
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// Bit J of each byte of `plane` becomes bit AT of the code; pair J of bits becomes bits 4 and 5.
template <int J, int AT = 4>
inline void add_bit(Bytes& code, Bytes plane) {
  const __m512i moved = J <= AT ? _mm512_slli_epi16(plane.v, AT - (J <= AT ? J : AT)) : _mm512_srli_epi16(plane.v, (J > AT ? J : AT) - AT);
  code.v = _mm512_or_si512(code.v, _mm512_and_si512(moved, _mm512_set1_epi8(1 << AT)));
}
template <int J>
inline void add_pair(Bytes& code, Bytes plane) {
  const __m512i at4 = J <= 2 ? _mm512_slli_epi16(plane.v, 4 - 2 * (J <= 2 ? J : 2)) : _mm512_srli_epi16(plane.v, 2);
  code.v = _mm512_or_si512(code.v, _mm512_and_si512(at4, _mm512_set1_epi8(0x30)));
}
template <int J>
inline Bytes pair_of_bits(Bytes plane) {  // J of each byte
  return {_mm512_and_si512(_mm512_srli_epi16(plane.v, 2 * J), _mm512_set1_epi8(3))};
}
inline Bytes load_sixteen(const uint8_t* p) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))}; }  // four times
inline Bytes look_up(Bytes sixteen, Bytes nibbles) { return {_mm512_shuffle_epi8(sixteen.v, nibbles.v)}; }
inline I32 iload_i8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
inline I32 iload_low_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), _mm512_set1_epi32(15))};
}
inline I32 imul(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
// (code - zero) * the scale of its lane + to, in 8 bits.
inline Bytes scale_codes(Bytes codes, I32 scale, int zero, int to) {
  const __m512i low = _mm512_set1_epi16(255), centred = _mm512_sub_epi8(codes.v, _mm512_set1_epi8(char(zero)));
  const __m512i words = _mm512_or_si512(_mm512_and_si512(scale.v, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(scale.v, 16));
  const __m512i even = _mm512_and_si512(_mm512_mullo_epi16(centred, words), low);
  const __m512i odd = _mm512_slli_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(centred, 8), words), 8);
  return {_mm512_add_epi8(_mm512_or_si512(even, odd), _mm512_set1_epi8(char(to)))};
}
// twice - a where a bit is set, else a.
inline Bytes reflect_where(Bytes a, const uint8_t* bits, int twice) {
  uint64_t mask;
  __builtin_memcpy(&mask, bits, 8);
  return {_mm512_mask_sub_epi8(a.v, mask, _mm512_set1_epi8(char(twice)), a.v)};
}
// 64 bytes and, for each of UPPER more bits, 64 bits: 64 numbers.
template <int UPPER>
inline void join_indices(const uint8_t* low, const uint8_t* upper, uint16_t* out) {
  for (int half = 0; half < 2; half++) {
    __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)(low + 32 * half)));
    for (int b = 0; b < UPPER; b++) {
      uint32_t mask;
      __builtin_memcpy(&mask, upper + 8 * b + 4 * half, 4);
      x = _mm512_mask_add_epi16(x, mask, x, _mm512_set1_epi16(short(0x100 << b)));
    }
    _mm512_storeu_si512(out + 32 * half, x);
  }
}
// Rows of four bytes, one for each output; index(lane) says which.
template <class Index>
inline Bytes rows_of_four(const uint32_t* rows, Index&& index) {
  const auto row = [&](int lane) { return int(rows[index(lane)]); };
  return {_mm512_setr_epi32(row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7), row(8), row(9), row(10), row(11), row(12),
                            row(13), row(14), row(15))};
}
// Rows of eight bytes: their first four and their last four. Outputs 0, 1, 4, 5, ... and 2, 3, 6, 7, ... are loaded together, so that a
// shuffle within lanes brings them into order.
template <class Index>
inline void rows_of_eight(const uint64_t* rows, Index&& index, Bytes& first, Bytes& last) {
  const auto two = [&](int lane) { return _mm_set_epi64x(int64_t(rows[index(lane + 1)]), int64_t(rows[index(lane)])); };
  const auto eight = [&](int lane) {
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(two(lane)), two(lane + 4), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(two(lane + 8)), two(lane + 12), 1);
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  };
  const __m512 a = eight(0), b = eight(2);
  first = {_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88))}, last = {_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xdd))};
}
// 2^(e - 128) for sixteen bytes e.
inline F32 load_power(const uint8_t* p) {
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), one = _mm512_set1_epi32(1);
  const __m512i small = _mm512_slli_epi32(_mm512_add_epi32(_mm512_and_si512(e, one), one), 21);  // right below 2
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), small))};
}
// Half of sixteen unsigned floats of 4 bits of exponent and 3 of mantissa; a byte of 127 is 0, else the highest bit means nothing.
inline F32 load_float8(const uint8_t* p) {
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), most = _mm512_set1_epi32(127);
  const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(x, most), 20));
  return {_mm512_maskz_mul_ps(_mm512_cmpneq_epi32_mask(x, most), value, _mm512_set1_ps(0x1p119f))};
}
inline I32 field(Bytes a, int bit, int mask) {  // of each dword; within one byte of it
  return {_mm512_and_si512(_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(bit)), _mm512_set1_epi32(mask))};
}
inline Bytes splat_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm512_set1_epi32(quad)};
}
// acc + sum over four of (unsigned weight code * signed activation), for each output. Exact.
// Written in assembly because GCC 12 surrounds the intrinsic with copies of the sum, and stores them.
inline I32 dot(I32 acc, Bytes codes, Bytes x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(codes.v), "v"(x.v));
  return acc;
}
inline I32 dot_wide(I32 acc, Bytes codes, Bytes x) { return dot(acc, codes, x); }
constexpr bool WIDE_DOT_IS_CENTRED = false;  // dot_wide uses codes as they are, not minus 128

inline I32 iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void istore(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
inline void store_i16(int16_t* p, I32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(a.v)); }
inline Bytes pairs(I32 first, I32 second) {  // of numbers of 16 bits, lane by lane
  return {_mm512_mask_blend_epi16(0xaaaaaaaa, first.v, _mm512_slli_epi32(second.v, 16))};
}
// acc + sum over two of products of 16 bits, lane by lane. Exact; sums wrap.
inline I32 dot_pairs(I32 acc, Bytes a, Bytes b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc.v) : "v"(a.v), "v"(b.v));
  return acc;
}

constexpr int ATTENTION_ROWS = 6;  // x 4 vectors
constexpr int TILE_ROWS = 6;  // x 2 panels of 16 outputs: 12 sums, 12 dots, and room for codes and scales in 32 registers
constexpr int PACKED_TILE = 8;  // sums of one panel, beside the 8 vectors of its codes

// Eight rows of eight words of 64 bits become columns; in each word the two numbers of 16 bits in the middle change places.
inline void turn_square(const uint8_t* in, size_t in_stride, uint8_t* out, size_t out_stride) {
  const __m512i middle = _mm512_set1_epi64(0x0706030205040100);
  const __m512i order =
      _mm512_or_si512(middle, _mm512_set_epi64(0x0808080808080808, 0, 0x0808080808080808, 0, 0x0808080808080808, 0, 0x0808080808080808, 0));
  __m512i r[8], t[8];
  for (int i = 0; i < 8; i++) r[i] = _mm512_shuffle_epi8(_mm512_loadu_si512(in + i * in_stride), order);
  for (int i = 0; i < 8; i += 2) t[i] = _mm512_unpacklo_epi64(r[i], r[i + 1]), t[i + 1] = _mm512_unpackhi_epi64(r[i], r[i + 1]);
  for (int odd = 0; odd < 2; odd++) {
    const __m512i a = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0x88), b = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0xdd);
    const __m512i c = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0x88), d = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0xdd);
    _mm512_storeu_si512(out + odd * out_stride, _mm512_shuffle_i64x2(a, c, 0x88));
    _mm512_storeu_si512(out + (2 + odd) * out_stride, _mm512_shuffle_i64x2(b, d, 0x88));
    _mm512_storeu_si512(out + (4 + odd) * out_stride, _mm512_shuffle_i64x2(a, c, 0xdd));
    _mm512_storeu_si512(out + (6 + odd) * out_stride, _mm512_shuffle_i64x2(b, d, 0xdd));
  }
}

}  // namespace everwarm::avx512

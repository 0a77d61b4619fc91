// Sixteen lanes of f32 / i32 as pairs of AVX2 registers (with FMA and F16C). Same bits as the other simd_*.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace everwarm::avx2 {

struct F32 {
  __m256 a, b;
};
struct I32 {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 div(F32 x, F32 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 min(F32 x, F32 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F32 abs(F32 x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline I32 isplat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 iadd(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline F32 to_f32(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I32 round(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 scale_by_power(F32 x, I32 n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.a), _mm256_slli_epi32(n.a, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.b), _mm256_slli_epi32(n.b, 23)))};
}
inline F32 keep_if_at_least(F32 a, F32 x, float limit) {
  const __m256 l = _mm256_set1_ps(limit);
  return {_mm256_and_ps(a.a, _mm256_cmp_ps(x.a, l, _CMP_GE_OQ)), _mm256_and_ps(a.b, _mm256_cmp_ps(x.b, l, _CMP_GE_OQ))};
}
inline F32 zero_where_equal(F32 a, float x) {
  const __m256 v = _mm256_set1_ps(x);
  return {_mm256_and_ps(a.a, _mm256_cmp_ps(a.a, v, _CMP_NEQ_UQ)), _mm256_and_ps(a.b, _mm256_cmp_ps(a.b, v, _CMP_NEQ_UQ))};
}
inline float reduce_add(F32 x) {
  const __m256 eight = _mm256_add_ps(x.a, x.b);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32 x) {
  const __m256 eight = _mm256_max_ps(x.a, x.b);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F32 load_bf16(const uint16_t* p) {
  const __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  const __m256i b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
inline void store_f16(uint16_t* p, F32 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline F32 load_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 load_u8(const uint8_t* p) {
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 load_low_nibbles(const uint8_t* p) {
  const __m128i x = _mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 load_high_nibbles(const uint8_t* p) {
  const __m128i x = _mm_and_si128(_mm_srli_epi16(_mm_loadu_si128((const __m128i*)p), 4), _mm_set1_epi8(15));
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 replace_where(F32 x, const uint8_t* ids, int id, const uint16_t* values) {
  const __m128i equal = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i*)ids), _mm_set1_epi8(char(id)));
  if (!_mm_movemask_epi8(equal)) return x;
  const F32 v = load_f16(values);
  return {_mm256_blendv_ps(x.a, v.a, _mm256_castsi256_ps(_mm256_cvtepi8_epi32(equal))),
          _mm256_blendv_ps(x.b, v.b, _mm256_castsi256_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(equal, 8))))};
}
inline F32 splat_f16(uint16_t h) { return splat(_cvtsh_ss(h)); }
inline void store_i8(int8_t* p, I32 x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline Bytes load_bytes(const uint8_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}; }
inline Bytes hold(Bytes x) { return x; }
inline void store_bytes(uint8_t* p, Bytes x) { _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 32), x.b); }
inline Bytes low_nibbles(Bytes x) { return {_mm256_and_si256(x.a, _mm256_set1_epi8(15)), _mm256_and_si256(x.b, _mm256_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes x) { return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}); }
template <int J, int AT = 4>
inline void add_bit(Bytes& code, Bytes plane) {
  const auto moved = [](__m256i v) {
    return J <= AT ? _mm256_slli_epi16(v, AT - (J <= AT ? J : AT)) : _mm256_srli_epi16(v, (J > AT ? J : AT) - AT);
  };
  const __m256i mask = _mm256_set1_epi8(1 << AT);
  code.a = _mm256_or_si256(code.a, _mm256_and_si256(moved(plane.a), mask));
  code.b = _mm256_or_si256(code.b, _mm256_and_si256(moved(plane.b), mask));
}
template <int J>
inline void add_pair(Bytes& code, Bytes plane) {
  const auto at4 = [](__m256i v) { return J <= 2 ? _mm256_slli_epi16(v, 4 - 2 * (J <= 2 ? J : 2)) : _mm256_srli_epi16(v, 2); };
  const __m256i mask = _mm256_set1_epi8(0x30);
  code.a = _mm256_or_si256(code.a, _mm256_and_si256(at4(plane.a), mask));
  code.b = _mm256_or_si256(code.b, _mm256_and_si256(at4(plane.b), mask));
}
template <int J>
inline Bytes pair_of_bits(Bytes plane) {
  const __m256i three = _mm256_set1_epi8(3);
  return {_mm256_and_si256(_mm256_srli_epi16(plane.a, 2 * J), three), _mm256_and_si256(_mm256_srli_epi16(plane.b, 2 * J), three)};
}
inline Bytes load_sixteen(const uint8_t* p) {
  const __m256i x = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {x, x};
}
inline Bytes look_up(Bytes sixteen, Bytes x) { return {_mm256_shuffle_epi8(sixteen.a, x.a), _mm256_shuffle_epi8(sixteen.b, x.b)}; }
inline I32 iload_i8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
inline I32 iload_low_nibbles(const uint8_t* p) {
  const __m128i x = _mm_and_si128(_mm_loadu_si128((const __m128i*)p), _mm_set1_epi8(15));
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline I32 imul(I32 x, I32 y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline Bytes scale_codes(Bytes codes, I32 scale, int zero, int to) {
  const auto scaled = [zero, to](__m256i c, __m256i s) {
    const __m256i low = _mm256_set1_epi16(255), centred = _mm256_sub_epi8(c, _mm256_set1_epi8(char(zero)));
    const __m256i words = _mm256_or_si256(_mm256_and_si256(s, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(s, 16));
    const __m256i even = _mm256_and_si256(_mm256_mullo_epi16(centred, words), low);
    const __m256i odd = _mm256_slli_epi16(_mm256_mullo_epi16(_mm256_srli_epi16(centred, 8), words), 8);
    return _mm256_add_epi8(_mm256_or_si256(even, odd), _mm256_set1_epi8(char(to)));
  };
  return {scaled(codes.a, scale.a), scaled(codes.b, scale.b)};
}
inline Bytes reflect_where(Bytes x, const uint8_t* bits, int twice) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i each = _mm256_set1_epi64x(int64_t(0x8040201008040201)), both = _mm256_set1_epi8(char(twice));
  const auto reflected = [&](__m256i v, const uint8_t* from) {
    int32_t word;
    __builtin_memcpy(&word, from, 4);
    const __m256i bit = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), each);
    return _mm256_blendv_epi8(v, _mm256_sub_epi8(both, v), _mm256_cmpeq_epi8(bit, each));
  };
  return {reflected(x.a, bits), reflected(x.b, bits + 4)};
}
template <int UPPER>
inline void join_indices(const uint8_t* low, const uint8_t* upper, uint16_t* out) {
  const __m256i each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, short(32768));
  for (int part = 0; part < 4; part++) {
    __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(low + 16 * part)));
    for (int b = 0; b < UPPER; b++) {
      int16_t mask;
      __builtin_memcpy(&mask, upper + 8 * b + 2 * part, 2);
      const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(mask), each), each);
      x = _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi16(short(0x100 << b))));
    }
    _mm256_storeu_si256((__m256i*)(out + 16 * part), x);
  }
}
template <class Index>
inline Bytes rows_of_four(const uint32_t* rows, Index&& index) {
  const auto row = [&](int lane) { return int(rows[index(lane)]); };
  return {_mm256_setr_epi32(row(0), row(1), row(2), row(3), row(4), row(5), row(6), row(7)),
          _mm256_setr_epi32(row(8), row(9), row(10), row(11), row(12), row(13), row(14), row(15))};
}
template <class Index>
inline void rows_of_eight(const uint64_t* rows, Index&& index, Bytes& first, Bytes& last) {
  const auto two = [&](int lane) { return _mm_set_epi64x(int64_t(rows[index(lane + 1)]), int64_t(rows[index(lane)])); };
  const auto four = [&](int lane) {
    return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(two(lane)), two(lane + 4), 1));
  };
  const __m256 a = four(0), b = four(2), c = four(8), d = four(10);
  first = {_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(c, d, 0x88))};
  last = {_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd)), _mm256_castps_si256(_mm256_shuffle_ps(c, d, 0xdd))};
}
inline F32 load_power(const uint8_t* p) {
  const auto power = [](__m256i e) {
    const __m256i one = _mm256_set1_epi32(1), small = _mm256_slli_epi32(_mm256_add_epi32(_mm256_and_si256(e, one), one), 21);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), small));
  };
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {power(_mm256_cvtepu8_epi32(x)), power(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F32 load_float8(const uint8_t* p) {
  const auto value = [](__m256i v) {
    const __m256i most = _mm256_set1_epi32(127), bits = _mm256_slli_epi32(_mm256_and_si256(v, most), 20);
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpeq_epi32(v, most), bits)), _mm256_set1_ps(0x1p119f));
  };
  const __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {value(_mm256_cvtepu8_epi32(x)), value(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline I32 field(Bytes x, int bit, int mask) {
  const __m128i count = _mm_cvtsi32_si128(bit);
  const __m256i m = _mm256_set1_epi32(mask);
  return {_mm256_and_si256(_mm256_srl_epi32(x.a, count), m), _mm256_and_si256(_mm256_srl_epi32(x.b, count), m)};
}
inline Bytes splat_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return {_mm256_set1_epi32(quad), _mm256_set1_epi32(quad)};
}
// Codes up to 63: no pair of products can saturate 16 bits.
inline I32 dot(I32 acc, Bytes codes, Bytes x) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.a, x.a), ones)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(codes.b, x.b), ones))};
}
// Codes up to 255, minus 128: the sign moves to the activation, and 2 * 128 * 127 still fits.
inline I32 dot_wide(I32 acc, Bytes codes, Bytes x) {
  const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  const __m256i wa = _mm256_xor_si256(codes.a, flip), wb = _mm256_xor_si256(codes.b, flip);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wa), _mm256_sign_epi8(x.a, wa)), ones)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(wb), _mm256_sign_epi8(x.b, wb)), ones))};
}
constexpr bool WIDE_DOT_IS_CENTRED = true;

inline I32 iload(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))}; }
inline void istore(int32_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)(p + 8), x.b); }
inline void store_i16(int16_t* p, I32 x) { _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8)); }
inline Bytes pairs(I32 first, I32 second) {
  return {_mm256_blend_epi16(first.a, _mm256_slli_epi32(second.a, 16), 0xaa),
          _mm256_blend_epi16(first.b, _mm256_slli_epi32(second.b, 16), 0xaa)};
}
inline I32 dot_pairs(I32 acc, Bytes x, Bytes y) {
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}

// Only vbmi.h has them.
constexpr bool fast_grids() { return false; }
template <auto CODES>
inline void fast_grid_codes(const uint8_t*, uint8_t*) {}

constexpr int ATTENTION_ROWS = 2;  // x 4 vectors
constexpr int TILE_ROWS = 2;  // sixteen registers hold two rows of two panels' dots; sums are spilled
constexpr int PACKED_TILE = 4;

// Eight rows of eight words of 64 bits become columns; in each word the two numbers of 16 bits in the middle change places.
inline void turn_square(const uint8_t* in, size_t in_stride, uint8_t* out, size_t out_stride) {
  const __m256i order =
      _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  for (int y = 0; y < 8; y += 4)
    for (int x = 0; x < 8; x += 4) {
      __m256i r[4];
      for (int i = 0; i < 4; i++)
        r[i] = _mm256_shuffle_epi8(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + (y + i) * in_stride + 8 * x)), order);
      const __m256i a = _mm256_unpacklo_epi64(r[0], r[1]), b = _mm256_unpackhi_epi64(r[0], r[1]);
      const __m256i c = _mm256_unpacklo_epi64(r[2], r[3]), d = _mm256_unpackhi_epi64(r[2], r[3]);
      const auto put = [&](int i, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (x + i) * out_stride + 8 * y), v); };
      put(0, _mm256_permute2x128_si256(a, c, 0x20)), put(1, _mm256_permute2x128_si256(b, d, 0x20));
      put(2, _mm256_permute2x128_si256(a, c, 0x31)), put(3, _mm256_permute2x128_si256(b, d, 0x31));
    }
}

}  // namespace everwarm::avx2

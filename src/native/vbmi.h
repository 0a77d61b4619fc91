// Rows of grids out of registers, where the processor can permute bytes of two of them (AVX-512 VBMI: Ice Lake, Zen 4). Asked at run time,
// because the other AVX-512 kernels do without. The same codes as by look-up in memory, two to three times as fast.
#pragma once
#include <immintrin.h>

#include <cstdlib>

#include "grids.h"

namespace everwarm::avx512 {

// EVERWARM_WITHOUT_VBMI is for tests of what other processors run.
inline bool fast_grids() {
  static const bool has = __builtin_cpu_supports("avx512vbmi") && !std::getenv("EVERWARM_WITHOUT_VBMI");
  return has;
}

#define EVERWARM_VBMI __attribute__((target("avx512vbmi")))

// table[index] for 64 indices of 7 bits, and a mask for each further bit.
template <int ROWS>
EVERWARM_VBMI inline __m512i permute(const uint8_t* table, __m512i index, const __mmask64* bits) {
  if constexpr (ROWS == 128) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
  } else {
    constexpr int BIT = ROWS == 256 ? 0 : ROWS == 512 ? 1 : 2;
    const __m512i low = permute<ROWS / 2>(table, index, bits), high = permute<ROWS / 2>(table + ROWS / 2, index, bits);
    return _mm512_mask_blend_epi8(bits[BIT], low, high);
  }
}

template <Codes C>
constexpr int grid_size() {
  return C == Codes::iq2_s ? 1024 : C == Codes::iq2_xs || C == Codes::iq3_s ? 512 : 256;
}

template <Codes C>
inline const uint8_t* small_grid() {
  if constexpr (C == Codes::iq2_xxs) return SMALL_GRIDS.iq2_xxs;
  if constexpr (C == Codes::iq2_xs) return SMALL_GRIDS.iq2_xs;
  if constexpr (C == Codes::iq2_s) return SMALL_GRIDS.iq2_s;
  if constexpr (C == Codes::iq3_xxs) return SMALL_GRIDS.iq3_xxs;
  if constexpr (C == Codes::iq3_s) return SMALL_GRIDS.iq3_s;
}

// Four bytes of 64 rows, one vector for each: the rows of four outputs are together in 16 bytes (place_in_batch), so interleaving makes
// vectors of sixteen outputs. Levels become codes, signs are applied, and vector i goes to out + i * stride.
EVERWARM_VBMI inline void store_rows(__m512i a, __m512i b, __m512i c, __m512i d, __m512i codes, const uint8_t* signs, uint8_t* out,
                                     int stride) {
  const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
  const __m512i cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
  const __m512i rows[4] = {_mm512_unpacklo_epi16(ab[0], cd[0]), _mm512_unpackhi_epi16(ab[0], cd[0]), _mm512_unpacklo_epi16(ab[1], cd[1]),
                           _mm512_unpackhi_epi16(ab[1], cd[1])};
  for (int i = 0; i < 4; i++) {
    const __m512i code = _mm512_shuffle_epi8(codes, rows[i]);
    uint64_t negative;
    __builtin_memcpy(&negative, signs + i * stride / 8, 8);
    _mm512_store_si512(out + i * stride, _mm512_mask_sub_epi8(code, negative, _mm512_set1_epi8(char(128)), code));
  }
}

// All codes of a panel and group, at p as GridShape says, into 512 bytes.
template <Codes C>
EVERWARM_VBMI void fast_grid_codes(const uint8_t* p, uint8_t* out) {
  constexpr GridShape shape = grid_shape(C);
  constexpr int ROWS = grid_size<C>();
  const uint8_t* grid = small_grid<C>();
  const uint8_t* levels = shape.row == 8 ? IQ2_CODES : C == Codes::iq3_s ? IQ3_S_CODES : IQ3_XXS_CODES;
  const __m512i codes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)levels));
  for (int batch = 0; batch < shape.batches(); batch++) {
    const __m512i index = _mm512_loadu_si512(p + 64 * batch);
    __mmask64 bits[3] = {_mm512_movepi8_mask(index)};
    for (int bit = 0; bit < shape.upper_bits; bit++) {
      uint64_t upper;
      __builtin_memcpy(&upper, p + shape.upper_at() + (batch * shape.upper_bits + bit) * 8, 8);
      bits[1 + bit] = upper;
    }
    const __m512i first = permute<ROWS>(grid, index, bits), last = permute<ROWS>(grid + ROWS, index, bits);
    if constexpr (shape.row == 8) {
      const __m512i three = _mm512_set1_epi8(3);
      for (int half = 0; half < 2; half++) {
        const __m512i x = half ? last : first;
        store_rows(_mm512_and_si512(x, three), _mm512_and_si512(_mm512_srli_epi16(x, 2), three),
                   _mm512_and_si512(_mm512_srli_epi16(x, 4), three), _mm512_and_si512(_mm512_srli_epi16(x, 6), three), codes,
                   p + shape.signs_at() + 8 * half, out + 64 * half, 128);
      }
    } else {
      const __m512i fifteen = _mm512_set1_epi8(15);
      store_rows(_mm512_and_si512(first, fifteen), _mm512_and_si512(_mm512_srli_epi16(first, 4), fifteen), _mm512_and_si512(last, fifteen),
                 _mm512_and_si512(_mm512_srli_epi16(last, 4), fifteen), codes, p + shape.signs_at() + 32 * batch, out + 256 * batch, 64);
    }
  }
}

#undef EVERWARM_VBMI

}  // namespace everwarm::avx512

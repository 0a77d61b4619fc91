// Codes of few bits, scales of few bits: how they become what the products take. Included once per instruction set, inside its namespace.

// The planes of one panel.
struct PanelPlanes {
  const uint8_t *code, *thin, *small;
  const uint16_t* half;
  explicit PanelPlanes(const Weight& w, int panel)
      : code(w.code(panel, 0)), thin(w.thin(panel, 0)), small(w.small(panel, 0)), half(w.half(panel)) {}
};

// Rows of a grid for sixteen outputs, then their signs.
template <Codes C>
[[gnu::always_inline]] inline void load_grid_codes(const uint8_t* p, Bytes out[8]) {
  constexpr GridShape shape = grid_shape(C);
  if constexpr (C != Codes::iq1) {
    if (fast_grids()) {
      alignas(64) uint8_t codes[512];
      fast_grid_codes<C>(p, codes);
      for (int j = 0; j < 8; j++) out[j] = load_bytes(codes + 64 * j);
      return;
    }
  }
  const auto rows = grid_rows<C>();
  const auto look_up_batch = [&](int batch, const auto* indices) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto index = [&](int lane) { return indices[place_in_batch(i, lane)]; };
      if constexpr (shape.row == 8)
        rows_of_eight(rows, index, out[2 * i], out[2 * i + 1]);
      else
        out[4 * batch + i] = rows_of_four(rows, index);
    }
  };
  constexpr int BATCHES = shape.batches();
#pragma GCC unroll 2
  for (int batch = 0; batch < BATCHES; batch++) {
    if constexpr (shape.upper_bits) {
      alignas(64) uint16_t indices[64];
      join_indices<shape.upper_bits>(p + 64 * batch, p + shape.upper_at() + batch * shape.upper_bits * 8, indices);
      look_up_batch(batch, indices);
    } else {
      look_up_batch(batch, p + 64 * batch);
    }
  }
  if constexpr (shape.signs) {
    constexpr int ZERO = 64;  // of every grid with signs
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) out[j] = reflect_where(out[j], p + shape.signs_at() + 8 * j, 2 * ZERO);
  }
}

inline Bytes trit_codes(const uint8_t* super, int group, int vector) {
  const auto [from, digit] = trit_place(group, vector);
  alignas(64) uint8_t codes[64];
  for (int i = 0; i < 64; i++) codes[i] = uint8_t(uint8_t(super[64 * from + i] * POWERS_OF_3[digit]) * 3 >> 8);
  return load_bytes(codes);
}

template <Codes C>
constexpr const uint8_t* levels_of() {
  return C == Codes::iq4 ? IQ4_CODES : FP4_CODES;
}

template <Codes C>
[[gnu::always_inline]] inline void load_low_bit_codes(const PanelPlanes& w, int group, Bytes out[8]) {
  const uint8_t* p = w.code + size_t(group) * code_bytes(C);
  if constexpr (C == Codes::iq4 || C == Codes::fp4) {
    const Bytes levels = load_sixteen(levels_of<C>());
    for (int j = 0; j < 4; j++) {
      const Bytes both = hold(load_bytes(p + 64 * j));
      out[j] = look_up(levels, low_nibbles(both));
      out[j + 4] = look_up(levels, high_nibbles(both));
    }
  }
  if constexpr (C == Codes::two || C == Codes::three) {
    for (int half = 0; half < 2; half++) {
      const Bytes four = hold(load_bytes(p + 64 * half));
      Bytes* to = out + 4 * half;
      to[0] = pair_of_bits<0>(four), to[1] = pair_of_bits<1>(four), to[2] = pair_of_bits<2>(four), to[3] = pair_of_bits<3>(four);
    }
  }
  if constexpr (C == Codes::three) {
    const Bytes thin = hold(load_bytes(w.thin + size_t(group) * 64));
    add_bit<0, 2>(out[0], thin), add_bit<1, 2>(out[1], thin), add_bit<2, 2>(out[2], thin), add_bit<3, 2>(out[3], thin);
    add_bit<4, 2>(out[4], thin), add_bit<5, 2>(out[5], thin), add_bit<6, 2>(out[6], thin), add_bit<7, 2>(out[7], thin);
  }
  if constexpr (C == Codes::trits) {
    const uint8_t* super = w.code + size_t(group) / 8 * 8 * code_bytes(C);
    for (int j = 0; j < 8; j++) out[j] = trit_codes(super, group % 8, j);
  }
  if constexpr (is_grid(C)) load_grid_codes<C>(p, out);
}

template <Scales S, int STEPS>
[[gnu::always_inline]] inline void load_low_bit_scales(const PanelPlanes& w, int group, F32 scale[2], F32 minimum[2]) {
  const int super = group / (SUPER / GROUP);
  [[maybe_unused]] const uint16_t* half = w.half + super * f16_per_block(S) * PANEL;
  [[maybe_unused]] const uint8_t* small = w.small + size_t(group) * small_bytes(S);
  [[maybe_unused]] const auto odd = [](F32 s) { return fma(s, splat(2.f / STEPS), splat(1.f / STEPS)); };
  if constexpr (S == Scales::super_32) scale[0] = mul(load_f16(half), load_i8(reinterpret_cast<const int8_t*>(small)));
  if constexpr (S == Scales::only_super || S == Scales::super_six) scale[0] = load_f16(half);
  if constexpr (S == Scales::fours_min) {
    scale[0] = load_f16(half);  // the rest is multiplied with codes or with sums: see is_folded
    const F32 least = sub(splat(0.f), load_f16(half + PANEL));
    minimum[0] = mul(least, load_high_nibbles(small)), minimum[1] = mul(least, load_high_nibbles(small + PANEL));
  }
  if constexpr (S == Scales::odd) {
    const uint8_t* two = w.small + size_t(group) / 2 * 2 * small_bytes(S);
    scale[0] = mul(load_f16(half), odd(group % 2 ? load_high_nibbles(two) : load_low_nibbles(two)));
  }
  if constexpr (S == Scales::odd_16) {
    const F32 d = load_f16(half);
    scale[0] = mul(d, odd(load_low_nibbles(small))), scale[1] = mul(d, odd(load_high_nibbles(small)));
  }
  if constexpr (S == Scales::power) scale[0] = load_power(small);
  if constexpr (S == Scales::float8) scale[0] = load_float8(small), scale[1] = load_float8(small + PANEL);
}

// Scales of 16 inputs that are small integers, where a code times its scale still has 8 bits. Many rows take such products as their codes;
// few rows multiply the sums of 16 inputs instead. Both come to the same integer.
constexpr bool is_folded(Scales s) { return s == Scales::fours_min || s == Scales::super_six; }

// The zero of codes times scales: of Q2_K's, which are at most 45; of Q3_K's, which lie between -124 and 128.
constexpr int folded_zero(Scales s) { return s == Scales::super_six ? 124 : 0; }

template <Scales S>
inline I32 small_scales(const PanelPlanes& w, int group, int half) {
  const uint8_t* small = w.small + (size_t(group) * 2 + half) * PANEL;
  if constexpr (S == Scales::fours_min) return iload_low_nibbles(small);
  return iload_i8(reinterpret_cast<const int8_t*>(small));
}

template <Scales S>
inline void fold_scales(const PanelPlanes& w, int group, int zero, Bytes codes[8]) {
  for (int j = 0; j < 8; j++) codes[j] = scale_codes(codes[j], small_scales<S>(w, group, j / 4), zero, folded_zero(S));
}

// The code of one input for the sixteen outputs of a panel.
template <Codes C>
inline I32 low_bit_code(const PanelPlanes& w, int g, int vector, int byte) {
  const uint8_t* p = w.code + size_t(g) * code_bytes(C);
  if constexpr (C == Codes::iq4 || C == Codes::fp4) {
    const Bytes both = load_bytes(p + 64 * (vector % 4));
    return field(look_up(load_sixteen(levels_of<C>()), vector < 4 ? low_nibbles(both) : high_nibbles(both)), byte, 255);
  } else if constexpr (C == Codes::two) {
    return field(load_bytes(p + 64 * (vector / 4)), byte + 2 * (vector % 4), 3);
  } else if constexpr (C == Codes::three) {
    const I32 third = field(load_bytes(w.thin + size_t(g) * 64), byte + vector, 1), twice = iadd(third, third);
    return iadd(field(load_bytes(p + 64 * (vector / 4)), byte + 2 * (vector % 4), 3), iadd(twice, twice));
  } else if constexpr (C == Codes::trits) {
    return field(trit_codes(w.code + size_t(g) / 8 * 8 * code_bytes(C), g % 8, vector), byte, 255);
  } else {
    constexpr GridShape shape = grid_shape(C);
    const int i = vector * 4 / shape.row, shift = vector * 4 % shape.row * 8;
    const uint8_t *low = p + i / 4 * 64, *upper = p + shape.upper_at() + i / 4 * shape.upper_bits * 8;
    const auto rows = grid_rows<C>();
    alignas(64) uint32_t codes[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
      const int at = place_in_batch(i % 4, lane);
      int index = low[at];
      for (int bit = 0; bit < shape.upper_bits; bit++) index |= (upper[8 * bit + at / 8] >> at % 8 & 1) << (8 + bit);
      codes[lane] = uint32_t(rows[index] >> shift);
    }
    Bytes four = load_bytes(reinterpret_cast<const uint8_t*>(codes));
    if constexpr (shape.signs) four = reflect_where(four, p + shape.signs_at() + 8 * vector, 128);
    return field(four, byte, 255);
  }
}

// Products of quantised activations with packed weights. Included once per instruction set, inside its namespace.
//
// One output element is always computed in the same order: over the groups of 32 inputs from first to last, an exact integer dot
// product, then acc = fma(dot, scale * x_scale, acc), then acc = fma(minimum, x_scaled_sum, acc); at last the outliers of the row,
// from first to last, acc = fma(weight, x, acc). Neither the number of rows nor the tile they are computed in changes a bit.

template <Codes C>
[[gnu::always_inline]] inline void load_codes(const PanelPlanes& w, int group, Bytes out[8]) {
  if constexpr (is_low_bit(C)) return load_low_bit_codes<C>(w, group, out);
  const uint8_t* p = w.code + size_t(group) * code_bytes(C);
  if constexpr (C == Codes::bytes) {
    for (int j = 0; j < 8; j++) out[j] = load_bytes(p + 64 * j);
    return;
  }
  for (int j = 0; j < 4; j++) {
    const Bytes both = hold(load_bytes(p + 64 * j));
    out[j] = low_nibbles(both);
    out[j + 4] = high_nibbles(both);
  }
  if constexpr (C == Codes::five) {
    const Bytes thin = hold(load_bytes(w.thin + size_t(group) * 64));
    add_bit<0>(out[0], thin), add_bit<1>(out[1], thin), add_bit<2>(out[2], thin), add_bit<3>(out[3], thin);
    add_bit<4>(out[4], thin), add_bit<5>(out[5], thin), add_bit<6>(out[6], thin), add_bit<7>(out[7], thin);
  }
  if constexpr (C == Codes::six) {
    const uint8_t* q = w.thin + size_t(group) * 128;
    const Bytes low = hold(load_bytes(q)), high = hold(load_bytes(q + 64));
    add_pair<0>(out[0], low), add_pair<1>(out[1], low), add_pair<2>(out[2], low), add_pair<3>(out[3], low);
    add_pair<0>(out[4], high), add_pair<1>(out[5], high), add_pair<2>(out[6], high), add_pair<3>(out[7], high);
  }
}

// Scales and minima of a group: one for all of it, or one for each half.
constexpr int halves_of(Scales s) { return s == Scales::super || s == Scales::odd_16 || s == Scales::float8 ? 2 : 1; }
constexpr int minima_of(Scales s) { return s == Scales::fours_min ? 2 : has_minimum(s) ? 1 : 0; }

inline F32 load_super_scale(const PanelPlanes& w, int group, int half) {
  const int8_t* small = reinterpret_cast<const int8_t*>(w.small + (size_t(group) * 2 + half) * PANEL);
  return mul(load_f16(w.half + group / (SUPER / GROUP) * PANEL), load_i8(small));
}

template <Scales S, int STEPS>
[[gnu::always_inline]] inline void load_scales(const PanelPlanes& w, int group, F32 scale[2], F32 minimum[2]) {
  const uint16_t* half = w.half;
  if constexpr (S == Scales::half) scale[0] = load_f16(half + group * PANEL);
  if constexpr (S == Scales::half_min) {
    scale[0] = load_f16(half + group * 2 * PANEL);
    minimum[0] = load_f16(half + group * 2 * PANEL + PANEL);
  }
  if constexpr (S == Scales::super_min) {
    const uint16_t* super = half + group / (SUPER / GROUP) * 2 * PANEL;
    const uint8_t* small = w.small + size_t(group) * 2 * PANEL;
    scale[0] = mul(load_f16(super), load_u8(small));
    minimum[0] = sub(splat(0.f), mul(load_f16(super + PANEL), load_u8(small + PANEL)));
  }
  if constexpr (S == Scales::super) scale[0] = load_super_scale(w, group, 0), scale[1] = load_super_scale(w, group, 1);
  load_low_bit_scales<S, STEPS>(w, group, scale, minimum);
}

// Codes, scales and minima of a panel and group.
template <Codes C, Scales S>
[[gnu::always_inline]] inline void load_group(const PanelPlanes& w, int group, Bytes codes[8], F32 scale[2], F32 minimum[2]) {
  load_codes<C>(w, group, codes);
  load_scales<S, steps_of(C)>(w, group, scale, minimum);
}

// Rows of the next tile if `left` rows are left: TILE_ROWS, then 4, 2 and 1.
constexpr int tile_rows(int left) {
  int rows = TILE_ROWS;
  while (rows > left) rows = rows > 4 ? 4 : rows / 2;
  return rows;
}

// Outliers of some rows.
struct Outliers {
  struct One {
    unsigned input;
    float value;
    int row;  // in its tile
  };
  std::vector<One> by_row;    // row after row
  std::vector<One> in_turns;  // tile after tile; the rows of a tile take turns, so that their sums do not wait for each other
  std::vector<int> starts;    // of each row in `by_row`, and the end; of each tile in `in_turns`

  explicit Outliers(const QuantRows& x) {
    const int groups = x.inputs / GROUP;
    starts.reserve(x.rows + 1);
    for (int r = 0; r < x.rows; r++) {
      starts.push_back(int(by_row.size()));
      for (int g = 0; g < groups; g++) {
        const size_t at = size_t(r) * groups + g;
        if (x.outlier_at[at] >= 0) by_row.push_back({unsigned(g * GROUP + x.outlier_at[at]), x.outlier[at], 0});
      }
    }
    starts.push_back(int(by_row.size()));
    if (x.rows == 1) return;
    in_turns.reserve(by_row.size());
    for (int first = 0; first < x.rows; first += tile_rows(x.rows - first)) {
      const int rows = tile_rows(x.rows - first);
      for (int turn = 0; int(in_turns.size()) < starts[first + rows]; turn++)
        for (int t = 0; t < rows; t++)
          if (const int at = starts[first + t] + turn; at < starts[first + t + 1])
            in_turns.push_back({by_row[at].input, by_row[at].value, t});
    }
  }
};

// The weights of one input for the sixteen outputs of a panel.
template <Codes C, Scales S>
[[gnu::always_inline]] inline F32 column(const PanelPlanes& w, int zero, unsigned input) {
  const unsigned g = input / GROUP, vector = input % GROUP / 4, byte = input % 4 * 8;
  I32 code;
  if constexpr (is_low_bit(C)) {
    code = low_bit_code<C>(w, g, vector, byte);
  } else if constexpr (C == Codes::bytes) {
    code = field(load_bytes(w.code + size_t(g) * 512 + 64 * vector), byte, 255);
  } else {
    code = field(load_bytes(w.code + size_t(g) * 256 + 64 * (vector % 4)), byte + vector / 4 * 4, 15);
  }
  F32 c = sub(to_f32(code), splat(float(zero)));
  if constexpr (C == Codes::five) c = fma(to_f32(field(load_bytes(w.thin + size_t(g) * 64), byte + vector, 1)), splat(16.f), c);
  if constexpr (C == Codes::six)
    c = fma(to_f32(field(load_bytes(w.thin + size_t(g) * 128 + 64 * (vector / 4)), byte + vector % 4 * 2, 3)), splat(16.f), c);
  if constexpr (is_folded(S)) c = mul(c, to_f32(small_scales<S>(w, g, vector / 4)));
  if constexpr (S == Scales::super) return mul(c, load_super_scale(w, g, vector / 4));
  F32 scale[2], minimum[2];
  load_scales<S, steps_of(C)>(w, g, scale, minimum);
  const F32 s = scale[halves_of(S) == 2 ? vector / 4 : 0];
  if constexpr (has_minimum(S)) return fma(c, s, minimum[minima_of(S) == 2 ? vector / 4 : 0]);
  return mul(c, s);
}

// What the integer sums start from, so that they come out as sums over (code - zero) * x.
template <bool WIDE>
inline int32_t start(int zero, int32_t sum) {
  return WIDE && WIDE_DOT_IS_CENTRED ? (128 - zero) * sum : -zero * sum;
}

template <bool WIDE>
inline I32 dot_any(I32 acc, Bytes codes, Bytes x) {
  if constexpr (WIDE) return dot_wide(acc, codes, x);
  return dot(acc, codes, x);
}

constexpr int SLICE = 64;  // groups of a panel pair that are unpacked at a time: 64 KiB of codes, for all rows

// A panel pair, unpacked for many rows: codes [group][8][P][64], scales [group][halves][P][16], minima [group][minima][P][16].
struct Unpacked {
  const uint8_t* codes;
  const float *scales, *minima;
};

// Memory for it. All groups are kept until the end, because the weights of outliers are needed then.
struct Scratch {
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> codes, scales, minima;
  std::vector<Line> sums;  // of the slices so far, [row][P][16]

  // At least so many lines; what they held may be lost.
  static uint8_t* lines(std::vector<Line>& memory, size_t count) {
    if (memory.size() < count) memory.resize(count);
    return memory[0].bytes;
  }
  static float* floats(std::vector<Line>& memory, size_t count) { return reinterpret_cast<float*>(lines(memory, count)); }
};

template <Codes C, Scales S, int P>
void unpack(const Weight& w, int panel, int first, int count, uint8_t* all_codes, float* scales, float* minima) {
  constexpr int H = halves_of(S), M = minima_of(S);
  for (int p = 0; p < P; p++) {
    const PanelPlanes planes(w, panel + p);
    for (int g = first; g < first + count; g++) {
      Bytes codes[8];
      F32 scale[2], minimum[2];
      load_group<C, S>(planes, g, codes, scale, minimum);
      if constexpr (is_folded(S)) fold_scales<S>(planes, g, w.zero, codes);
      for (int j = 0; j < 8; j++) store_bytes(all_codes + ((size_t(g) * 8 + j) * P + p) * 64, codes[j]);
      for (int h = 0; h < H; h++) store(scales + ((size_t(g) * H + h) * P + p) * PANEL, scale[h]);
      for (int m = 0; m < M; m++) store(minima + ((size_t(g) * M + m) * P + p) * PANEL, minimum[m]);
    }
  }
}

// T rows x P panels over some groups of unpacked codes, added to acc: what prefill runs.
template <bool WIDE, int H, int M, int T, int P>
[[gnu::noinline]] void tile(const Unpacked& w, int zero, const QuantRows& x, int row, int first, int count, F32 (&acc)[T][P]) {
  const int groups = x.inputs / GROUP;
  const int8_t* codes = x.codes + size_t(row) * x.inputs + first * GROUP;
  const size_t at = size_t(row) * groups + first;
  const float* scale = x.scale + at;
  const float* scaled_sum = M == 2 ? x.scaled_halves + at * 2 : x.scaled_sum + at;
  const int32_t* sums = x.sums + at * 2;
  F32 local[T][P];  // a copy that nothing can alias stays in registers
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
    for (int p = 0; p < P; p++) local[t][p] = acc[t][p];
  for (int g = 0; g < count; g++) {
#pragma GCC unroll 2
    for (int h = 0; h < H; h++) {
      I32 d[T][P];
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const int32_t* s = sums + (size_t(t) * groups + g) * 2;
        const int32_t from = M ? 0 : start<WIDE>(zero, H == 1 ? s[0] + s[1] : s[h]);  // a minimum means that zero is 0
        for (int p = 0; p < P; p++) d[t][p] = isplat(from);
      }
      const uint8_t* c = w.codes + (size_t(first + g) * 8 + h * 4) * P * 64;
#pragma GCC unroll 8
      for (int j = 0; j < 8 / H; j++) {
        Bytes quad[P];
        for (int p = 0; p < P; p++) quad[p] = load_bytes(c + (j * P + p) * 64);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
          const Bytes q = splat_quad(codes + size_t(t) * x.inputs + g * GROUP + (h * 4 + j) * 4);
          for (int p = 0; p < P; p++) d[t][p] = dot_any<WIDE>(d[t][p], quad[p], q);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const F32 sx = splat(scale[size_t(t) * groups + g]);
        for (int p = 0; p < P; p++) {
          const F32 s = load(w.scales + ((size_t(first + g) * H + h) * P + p) * PANEL);
          local[t][p] = fma(to_f32(d[t][p]), mul(s, sx), local[t][p]);
        }
      }
    }
#pragma GCC unroll 2
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 8
      for (int t = 0; t < T; t++)
        for (int p = 0; p < P; p++) {
          const float sum = scaled_sum[(size_t(t) * groups + g) * M + m];
          local[t][p] = fma(load(w.minima + ((size_t(first + g) * M + m) * P + p) * PANEL), splat(sum), local[t][p]);
        }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
    for (int p = 0; p < P; p++) acc[t][p] = local[t][p];
}

constexpr size_t AHEAD = 4096;  // bytes of codes that decode asks for ahead: a page, where the hardware's own prefetching stops

// Asks memory for what comes a page of codes later. Small scales are a stream of their own that the hardware does not always follow.
template <Codes C, Scales S>
[[gnu::always_inline]] inline void ask_ahead(const PanelPlanes& w, int group) {
  const size_t later = group + AHEAD / code_bytes(C);
  for (int b = 0; b < code_bytes(C); b += 64) __builtin_prefetch(w.code + later * code_bytes(C) + b);
  if constexpr (small_bytes(S) > 0) __builtin_prefetch(w.small + later * small_bytes(S));
}

// T rows x one panel straight from the packed form: what decode runs. One panel after the other reads memory in order. Two sums
// per dot, so that their latencies overlap.
template <Codes C, Scales S, int T>
[[gnu::noinline]] void packed_tile(const Weight& w, const PanelPlanes& planes, const QuantRows& x, int row, F32 (&acc)[T]) {
  constexpr int H = halves_of(S), M = minima_of(S);
  constexpr bool WIDE = is_wide(C), FOLDED = is_folded(S);
  const int groups = w.groups(), zero = w.zero;
  const int8_t* codes_of_x = x.codes + size_t(row) * x.inputs;
  const float* scale_of_x = x.scale + size_t(row) * groups;
  const float* sum_of_x = M == 2 ? x.scaled_halves + size_t(row) * groups * 2 : x.scaled_sum + size_t(row) * groups;
  const int32_t* sums_of_x = x.sums + size_t(row) * groups * 2;
  F32 local[T];  // a copy that nothing can alias stays in registers
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) local[t] = splat(0.f);
  for (int g = 0; g < groups; g++) {
    ask_ahead<C, S>(planes, g);
    Bytes codes[8];
    F32 scale[2], minimum[2];
    load_group<C, S>(planes, g, codes, scale, minimum);
    [[maybe_unused]] I32 small[2];
    if constexpr (FOLDED) small[0] = small_scales<S>(planes, g, 0), small[1] = small_scales<S>(planes, g, 1);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const int at = t * groups + g;
      const int8_t* quads = codes_of_x + size_t(t) * x.inputs + g * GROUP;
      const int32_t* s = sums_of_x + size_t(at) * 2;
      I32 d0 = isplat(has_minimum(S) ? 0 : start<WIDE>(zero, H == 1 && !FOLDED ? s[0] + s[1] : s[0]));
      I32 d1 = isplat(H == 1 && !FOLDED ? 0 : has_minimum(S) ? 0 : start<WIDE>(zero, s[1]));
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        d0 = dot_any<WIDE>(d0, codes[j], splat_quad(quads + 4 * j));
        d1 = dot_any<WIDE>(d1, codes[j + 4], splat_quad(quads + 4 * j + 16));
      }
      const F32 sx = splat(scale_of_x[at]);
      if constexpr (FOLDED) d0 = imul(d0, small[0]), d1 = imul(d1, small[1]);
      if constexpr (H == 1) {
        local[t] = fma(to_f32(iadd(d0, d1)), mul(scale[0], sx), local[t]);
      } else {
        local[t] = fma(to_f32(d0), mul(scale[0], sx), local[t]);
        local[t] = fma(to_f32(d1), mul(scale[1], sx), local[t]);
      }
#pragma GCC unroll 2
      for (int m = 0; m < M; m++) local[t] = fma(minimum[m], splat(sum_of_x[at * M + m]), local[t]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) acc[t] = local[t];
}

// T rows x P panels of a matrix of floats, over the inputs from first to last.
template <Floats TYPE, int T, int P>
inline void float_tile(const FloatWeight& w, int panel, const float* x, F32 (&acc)[T][P]) {
  for (auto& r : acc)
    for (auto& a : r) a = splat(0.f);
  const size_t stride = size_t(w.inputs) * PANEL * w.element();
  const uint8_t* data = w.data + panel * stride;
  for (int k = 0; k < w.inputs; k++) {
    F32 v[P];
    for (int p = 0; p < P; p++) {
      const uint8_t* at = data + p * stride + size_t(k) * PANEL * w.element();
      if constexpr (TYPE == Floats::f32) v[p] = load(reinterpret_cast<const float*>(at));
      if constexpr (TYPE == Floats::f16) v[p] = load_f16(reinterpret_cast<const uint16_t*>(at));
      if constexpr (TYPE == Floats::bf16) v[p] = load_bf16(reinterpret_cast<const uint16_t*>(at));
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const F32 xk = splat(x[size_t(t) * w.inputs + k]);
      for (int p = 0; p < P; p++) acc[t][p] = fma(v[p], xk, acc[t][p]);
    }
  }
}

inline void finish_panel(const Product& product, int outputs, int panel, int row, F32 acc) {
  const int first = panel * PANEL;
  float* y = product.y + row * product.stride + first;
  if (first <= outputs - PANEL) {
    if (product.bias) acc = ::everwarm::EVERWARM_ISA::add(acc, load(product.bias + first));
    if (product.add) acc = ::everwarm::EVERWARM_ISA::add(load(y), acc);
    store(y, acc);
    return;
  }
  float v[PANEL];
  store(v, acc);
  for (int i = 0; first + i < outputs; i++) {
    if (product.bias) v[i] += product.bias[first + i];
    y[i] = product.add ? y[i] + v[i] : v[i];
  }
}

// Calls use(row, acc) for the rows from `row` on in tiles of at most MOST, then 4, 2 and 1: compute(row, acc) fills one.
template <int MOST, int P, class Compute, class Use>
inline void in_tiles(int rows, Compute&& compute, Use&& use, int row = 0) {
  for (; row + MOST <= rows; row += MOST) {
    F32 acc[MOST][P];
    compute(row, acc);
    use(row, acc);
  }
  if constexpr (MOST > 1) in_tiles<(MOST > 4 ? 4 : MOST / 2), P>(rows, compute, use, row);
}

// What is done with finished rows, behind a pointer: one copy of the kernels below serves all callers.
template <int P>
struct RowUse {
  void* use;
  void (*call)(void*, int row, int count, const F32 (*acc)[P]);

  template <class Use>
  explicit RowUse(Use& f)
      : use(&f), call([](void* g, int row, int count, const F32 (*acc)[P]) { (*static_cast<Use*>(g))(row, count, acc); }) {}
  template <int T>
  void operator()(int row, const F32 (&acc)[T][P]) const {
    call(use, row, T, acc);
  }
};

// Few rows are computed from the packed form, again for every tile of them; looking up a grid costs more than all else, so there it is one.
constexpr bool is_slow_to_unpack(Codes c) { return is_grid(c) || c == Codes::trits; }
constexpr int packed_tile_rows(Codes c) { return !is_low_bit(c) ? PACKED_TILE : is_slow_to_unpack(c) ? 1 : 4; }
constexpr int packed_rows(Codes c) {
  return c == Codes::nibbles || c == Codes::bytes ? 64 : is_low_bit(c) ? packed_tile_rows(c) : 2 * PACKED_TILE;
}

template <Codes C, Scales S, int P>
inline void rows_from_packed(const Weight& w, int panel, const QuantRows& x, const Outliers& outliers, const RowUse<P>& use) {
  const PanelPlanes planes[2] = {PanelPlanes(w, panel), PanelPlanes(w, panel + P - 1)};
  in_tiles<packed_tile_rows(C), P>(
      x.rows,
      [&](int row, auto& acc) {
        constexpr int T = sizeof acc / sizeof acc[0];
        for (int p = 0; p < P; p++) {
          F32 one[T];
          packed_tile<C, S>(w, planes[p], x, row, one);
          for (int t = 0; t < T; t++) acc[t][p] = one[t];
        }
      },
      [&](int row, auto& acc) {
        for (int t = 0; t < int(sizeof acc / sizeof acc[0]); t++) {
          F32 local[P];  // as above
          for (int p = 0; p < P; p++) local[p] = acc[t][p];
          for (int i = outliers.starts[row + t]; i < outliers.starts[row + t + 1]; i++) {
            const auto [input, value, unused] = outliers.by_row[i];
            for (int p = 0; p < P; p++) local[p] = fma(column<C, S>(planes[p], w.zero, input), splat(value), local[p]);
          }
          for (int p = 0; p < P; p++) acc[t][p] = local[p];
        }
        use(row, acc);
      });
}

// The weights of one input: the sum of its codes times 1 at that input.
template <bool WIDE, int H, int M, int P>
inline F32 unpacked_column(const Unpacked& w, int zero, unsigned input, int p) {
  static constexpr int8_t ONE[4][4] = {{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}};
  const Bytes codes = load_bytes(w.codes + (size_t(input / 4) * P + p) * 64);
  const F32 c = to_f32(dot_any<WIDE>(isplat(start<WIDE>(zero, 1)), codes, splat_quad(ONE[input % 4])));
  const F32 s = load(w.scales + (size_t(input / (GROUP / H)) * P + p) * PANEL);
  if constexpr (M) return fma(c, s, load(w.minima + (size_t(input / (GROUP / M)) * P + p) * PANEL));
  return mul(c, s);
}

// Adds the outliers of the T rows of a tile, those of each row from first to last.
template <bool WIDE, int H, int M, int T, int P>
inline void add_outliers(const Unpacked& w, int zero, const Outliers& outliers, int row, F32 (&acc)[T][P]) {
  for (int i = outliers.starts[row]; i < outliers.starts[row + T]; i++) {
    const Outliers::One& one = outliers.in_turns[i];
    for (int p = 0; p < P; p++)
      acc[one.row][p] = fma(unpacked_column<WIDE, H, M, P>(w, zero, one.input, p), splat(one.value), acc[one.row][p]);
  }
}

template <Codes C, Scales S, int P>
inline void rows_from_unpacked(const Weight& w, int panel, const QuantRows& x, const Outliers& outliers, Scratch& scratch,
                               const RowUse<P>& use) {
  constexpr int H = halves_of(S), M = minima_of(S);
  constexpr bool WIDE = is_wide(C) || S == Scales::super_six;
  const int groups = w.groups(), zero = is_folded(S) ? folded_zero(S) : w.zero;
  uint8_t* codes = scratch.lines(scratch.codes, size_t(groups) * 8 * P);
  float *scales = scratch.floats(scratch.scales, size_t(groups) * H * P),
        *minima = scratch.floats(scratch.minima, size_t(groups) * M * P + 1);
  float* sums = scratch.floats(scratch.sums, size_t(x.rows) * P);
  const Unpacked unpacked{codes, scales, minima};
  for (int first = 0; first < groups; first += SLICE) {
    const int count = groups - first < SLICE ? groups - first : SLICE;
    unpack<C, S, P>(w, panel, first, count, codes, scales, minima);
    in_tiles<TILE_ROWS, P>(
        x.rows,
        [&](int row, auto& acc) {
          for (size_t t = 0; t < sizeof acc / sizeof acc[0]; t++)
            for (int p = 0; p < P; p++) acc[t][p] = first ? load(sums + ((row + t) * P + p) * PANEL) : splat(0.f);
          tile<WIDE, H, M>(unpacked, zero, x, row, first, count, acc);
        },
        [&](int row, auto& acc) {
          constexpr int T = sizeof acc / sizeof acc[0];
          if (first + count < groups) {
            for (size_t t = 0; t < T; t++)
              for (int p = 0; p < P; p++) store(sums + ((row + t) * P + p) * PANEL, acc[t][p]);
            return;
          }
          add_outliers<WIDE, H, M>(unpacked, zero, outliers, row, acc);
          use(row, acc);
        });
  }
}

// A form is unpacked in registers for few rows, once into scratch for many.
template <Codes C, Scales S, int P>
[[gnu::noinline]] void form_rows(const Weight& w, int panel, const QuantRows& x, const Outliers& outliers, Scratch& scratch,
                                 const RowUse<P>& use) {
  if (x.rows <= packed_rows(C))
    rows_from_packed<C, S, P>(w, panel, x, outliers, use);
  else
    rows_from_unpacked<C, S, P>(w, panel, x, outliers, scratch, use);
}

// use(row, count, acc) for all rows of one or two panels, some rows at a time, whatever the form.
template <int P, class Use>
void any_form_rows(const Weight& w, int panel, const QuantRows& x, const Outliers& outliers, Scratch& scratch, Use&& use) {
#define EVERWARM_TYPE(name, code, scale, zero, inputs, bytes) \
  if (w.codes == Codes::code && w.scales == Scales::scale)    \
    return form_rows<Codes::code, Scales::scale, P>(w, panel, x, outliers, scratch, RowUse<P>(use));
  EVERWARM_QUANTISED_TYPES(EVERWARM_TYPE)
#undef EVERWARM_TYPE
}

template <int P, class Use>
void float_rows(const FloatWeight& w, int panel, const float* x, int rows, Use&& use) {
  const auto run = [&](auto compute) {
    in_tiles<TILE_ROWS, P>(rows, compute, [&](int row, auto& acc) { use(row, int(sizeof acc / sizeof acc[0]), acc); });
  };
  const auto at = [&](int row) { return x + size_t(row) * w.inputs; };
#define EVERWARM_TYPE(name, floats, bytes) \
  if (w.type == Floats::floats) return run([&](int row, auto& acc) { float_tile<Floats::floats>(w, panel, at(row), acc); });
  EVERWARM_FLOAT_TYPES(EVERWARM_TYPE)
#undef EVERWARM_TYPE
}

// Rows are taken in blocks whose codes stay in the last-level cache while panel after panel passes by.
constexpr size_t ROW_BLOCK_BYTES = 4 << 20;
inline int row_block(int inputs) {
  const int rows = int(ROW_BLOCK_BYTES / size_t(inputs));
  return rows < 4 * TILE_ROWS ? 4 * TILE_ROWS : rows / TILE_ROWS * TILE_ROWS;
}

inline QuantRows rows_from(const QuantRows& x, int first, int count) {
  const size_t at = size_t(first) * (x.inputs / GROUP);
  return {count,           x.inputs,          x.codes + size_t(first) * x.inputs,
          x.scale + at,    x.scaled_sum + at, x.scaled_halves + 2 * at,
          x.sums + 2 * at, x.outlier + at,    x.outlier_at + at};
}

inline Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

template <int P>
void product_panels(const Product& product, int panel, const QuantRows& q, const Outliers* outliers, const float* x, int first, int count) {
  const auto use_with = [&](int outputs) {
    return [&product, outputs, panel, first](int row, int count, const F32(*acc)[P]) {
      for (int t = 0; t < count; t++)
        for (int p = 0; p < P; p++) finish_panel(product, outputs, panel + p, first + row + t, acc[t][p]);
    };
  };
  if (product.quantised)
    any_form_rows<P>(*product.quantised, panel, q, *outliers, scratch_of_thread(), use_with(product.quantised->outputs));
  else
    float_rows<P>(*product.floats, panel, x + size_t(first) * product.floats->inputs, count, use_with(product.floats->outputs));
}

// Work is cut into pieces of some pairs of panels, as many for each thread, as equal as can be. With few rows a piece is memory whose
// beginning comes slowly, so small matrices are cut into fewer.
constexpr size_t PIECE_BYTES = 256 << 10;
struct Pieces {
  int pairs, count;

  Pieces(Pool& pool, int all_pairs, int rows, size_t bytes) : pairs(all_pairs) {
    const size_t threads = pool.threads(), least = 2 * threads, most = 8 * threads;
    const size_t wanted = rows > PACKED_TILE ? most : std::clamp(round_up(bytes / PIECE_BYTES, threads), least, most);
    count = int(std::min(wanted, size_t(pairs)));
  }
  int begin(int piece) const { return int(int64_t(pairs) * piece / count); }
  int largest() const { return (pairs + count - 1) / count; }
};

void products(Pool& pool, const QuantRows* q, const float* x, int rows, int inputs, const Product* list, int count) {
  if (rows <= 0) return;
  const auto panels_of = [](const Product& p) { return p.quantised ? p.quantised->panels() : p.floats->panels(); };
  int pairs = 0;
  size_t bytes = 0;
  for (int i = 0; i < count; i++) {
    pairs += (panels_of(list[i]) + 1) / 2;
    bytes += list[i].quantised ? list[i].quantised->bytes() : list[i].floats->bytes();
  }
  const Pieces pieces(pool, pairs, rows, bytes);
  const int block = row_block(inputs);
  for (int first = 0; first < rows; first += block) {
    const int some = rows - first < block ? rows - first : block;
    const QuantRows part = q ? rows_from(*q, first, some) : QuantRows{};
    const std::optional<Outliers> outliers = q ? std::optional<Outliers>(part) : std::nullopt;
    pool.run(pieces.count, [&](int piece, int) {
      for (int pair = pieces.begin(piece); pair < pieces.begin(piece + 1); pair++) {
        int i = 0, local = pair;
        while (local >= (panels_of(list[i]) + 1) / 2) local -= (panels_of(list[i++]) + 1) / 2;
        const int panel = 2 * local;
        if (panel + 1 < panels_of(list[i]))
          product_panels<2>(list[i], panel, part, outliers ? &*outliers : nullptr, x, first, some);
        else
          product_panels<1>(list[i], panel, part, outliers ? &*outliers : nullptr, x, first, some);
      }
    });
  }
}

// Products of different matrices with different rows, which all have as many inputs.
void grouped_products(Pool& pool, const QuantRows* q, const float* x, int inputs, const RowGroup* groups, int count) {
  const auto panels_of = [](const Product& p) { return p.quantised ? p.quantised->panels() : p.floats->panels(); };
  std::vector<int> ends(count);  // of each group's pairs of panels
  std::vector<QuantRows> parts(count);
  std::vector<std::optional<Outliers>> outliers(count);
  size_t bytes = 0;
  int pairs = 0, most = 0;
  for (int i = 0; i < count; i++) {
    const Product& product = groups[i].product;
    pairs += (panels_of(product) + 1) / 2, ends[i] = pairs;
    bytes += product.quantised ? product.quantised->bytes() : product.floats->bytes();
    most = groups[i].rows > most ? groups[i].rows : most;
    if (product.quantised) parts[i] = rows_from(*q, groups[i].first, groups[i].rows), outliers[i].emplace(parts[i]);
  }
  if (!pairs || !most) return;
  const Pieces pieces(pool, pairs, most, bytes);
  pool.run(pieces.count, [&](int piece, int) {
    for (int pair = pieces.begin(piece); pair < pieces.begin(piece + 1); pair++) {
      const int i = int(std::upper_bound(ends.begin(), ends.end(), pair) - ends.begin());
      const RowGroup& group = groups[i];
      if (!group.rows) continue;
      const int panel = 2 * (pair - (i ? ends[i - 1] : 0));
      const float* from = x + size_t(group.first) * inputs;
      const Outliers* theirs = outliers[i] ? &*outliers[i] : nullptr;
      if (panel + 1 < panels_of(group.product))
        product_panels<2>(group.product, panel, parts[i], theirs, from, 0, group.rows);
      else
        product_panels<1>(group.product, panel, parts[i], theirs, from, 0, group.rows);
    }
  });
}

// activation(x Gate^T) * (x Up^T), quantised as it is computed: a pair of panels is one group of 32 of the next product's inputs. Different
// matrices with different rows, which all have as many inputs and outputs. Without gates: what is positive of x Up^T, squared.
void grouped_gated(Pool& pool, const QuantRows& x, const GateGroup* groups, int count, Activation activation, const QuantOut& out) {
  if (!count) return;
  const int pairs = groups[0].up->outputs / GROUP;  // of each group
  const bool has_gates = groups[0].gate != nullptr;
  std::vector<QuantRows> parts;
  std::vector<Outliers> outliers;
  size_t bytes = 0;
  int most = 0;
  for (int i = 0; i < count; i++) {
    parts.push_back(rows_from(x, groups[i].first, groups[i].rows)), outliers.emplace_back(parts.back());
    bytes += (has_gates ? groups[i].gate->bytes() : 0) + groups[i].up->bytes();
    most = groups[i].rows > most ? groups[i].rows : most;
  }
  const Pieces pieces(pool, pairs * count, most, bytes);
  // Few rows wait for memory, which is fastest when it is read in order: all gates of a piece, then what stands beside them.
  const int at_once = most <= PACKED_TILE ? pieces.largest() : 1;
  const auto biased = [](F32 acc, const float* bias, int at) { return bias ? ::everwarm::EVERWARM_ISA::add(acc, load(bias + at)) : acc; };
  const auto compute_gate = [&](int task, float* gates) {
    const int i = task / pairs, pair = task % pairs;
    const float* bias = groups[i].gate_bias;
    any_form_rows<2>(*groups[i].gate, 2 * pair, parts[i], outliers[i], scratch_of_thread(), [&](int row, int rows, const F32(*acc)[2]) {
      for (int t = 0; t < rows; t++)
        for (int p = 0; p < 2; p++) store(gates + (row + t) * GROUP + p * PANEL, biased(acc[t][p], bias, pair * GROUP + p * PANEL));
    });
  };
  const auto compute_up = [&](int task, const float* gates) {
    const int i = task / pairs, pair = task % pairs;
    const float* bias = groups[i].up_bias;
    any_form_rows<2>(*groups[i].up, 2 * pair, parts[i], outliers[i], scratch_of_thread(), [&](int row, int rows, const F32(*acc)[2]) {
      for (int t = 0; t < rows; t++) {
        F32 both[2];
        for (int p = 0; p < 2; p++) {
          const F32 up = biased(acc[t][p], bias, pair * GROUP + p * PANEL);
          both[p] = has_gates ? gate_up(load(gates + (row + t) * GROUP + p * PANEL), up, activation) : squared(up);
        }
        quantize_group(both[0], both[1], out, size_t(groups[i].first + row + t) * pairs + pair);
      }
    });
  };
  pool.run(pieces.count, [&](int piece, int) {
    static thread_local std::vector<float> gates;
    const size_t each = size_t(most) * GROUP;
    gates.resize(each * at_once);
    const int end = pieces.begin(piece + 1);
    for (int first = pieces.begin(piece); first < end; first += at_once) {
      const int some = end - first < at_once ? end - first : at_once;
      for (int n = 0; has_gates && n < some; n++) compute_gate(first + n, &gates[n * each]);
      for (int n = 0; n < some; n++) compute_up(first + n, &gates[n * each]);
    }
  });
}

void gated(Pool& pool, const QuantRows& x, const Weight& gate, const Weight& up, Activation activation, const QuantOut& out) {
  const int block = row_block(x.inputs);
  for (int first = 0; first < x.rows; first += block) {
    const GateGroup some{first, x.rows - first < block ? x.rows - first : block, &gate, &up, nullptr, nullptr};
    grouped_gated(pool, x, &some, 1, activation, out);
  }
}

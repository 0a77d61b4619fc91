// Keys, values and attention. Included once per instruction set, inside its namespace.
//
// One layer of a block holds, for each KV head, BLOCK tokens of keys transposed, [head_dim][BLOCK], then of values, [BLOCK][head_dim]:
// a vector is sixteen tokens of keys, or sixteen elements of a value, and nothing is shuffled. As f16 that is all; q8 and q4 hold
// codes and, behind them, an f16 scale per token and 32 elements: keys' scales [head_dim / 32][BLOCK], values' [BLOCK][head_dim / 32].
// Behind the keys' scales come the greatest elements of each 32: f16 values [KEY_OUTLIERS][head_dim / 32][BLOCK], then their places
// among the 32 in the same order, a byte each.
//
// UNIT blocks are one unit of addition, at a fixed position: scores (times log2 e, so that powers of two do), their maximum m,
// l = sum of 2^(score - m), o = sum of 2^(score - m) v over its tokens from first to last; units are merged in order. So neither the
// rows of a batch nor the threads change a bit.

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int UNIT = 2, UNIT_TOKENS = UNIT * BLOCK;  // blocks that share one maximum: part of the numerics

inline size_t head_bytes(const KVShape& s) { return key_bytes(s) + value_bytes(s); }

// Sixteen codes of 4 bits, minus 8: the lower or the upper halves of sixteen bytes.
inline F32 centred_nibbles(const uint8_t* p, int upper) { return sub(upper ? load_high_nibbles(p) : load_low_nibbles(p), splat(8.f)); }

// Readers of a matrix [row][16 * vector] as floats. `ask` asks for memory that will be read soon: it is far, and the hardware follows
// a stream to the end of its page only.
struct FloatReader {
  const float* data;
  size_t stride;
  F32 at(int row, int vector) const { return load(data + row * stride + 16 * vector); }
  void ask(int, int) const {}
};

// Keys of one head and block: a row is an element of the head, a vector sixteen tokens.
template <KVType TYPE>
struct KeyReader {
  const uint8_t* head;
  int dim;
  F32 at(int row, int vector) const {
    const size_t elements = size_t(dim) * BLOCK, at = size_t(row) * BLOCK + 16 * vector;
    if constexpr (TYPE == KVType::f16) return load_f16(reinterpret_cast<const uint16_t*>(head) + at);
    const size_t scales = elements / GROUP, group = size_t(row / GROUP) * BLOCK + 16 * vector;
    const auto* scale = reinterpret_cast<const uint16_t*>(head + (TYPE == KVType::q8 ? elements : elements / 2));
    const auto* outlier = scale + scales;
    const auto* place = reinterpret_cast<const uint8_t*>(outlier + KEY_OUTLIERS * scales);
    const F32 codes = TYPE == KVType::q8 ? load_i8(reinterpret_cast<const int8_t*>(head) + at)
                                         : centred_nibbles(head + row / 2 * BLOCK + 16 * vector, row % 2);  // two rows share bytes
    F32 keys = mul(codes, load_f16(scale + group));
    for (int i = 0; i < KEY_OUTLIERS; i++) keys = replace_where(keys, place + i * scales + group, row % GROUP, outlier + i * scales + group);
    return keys;
  }
  void ask(int row, int vector) const { __builtin_prefetch(head + (size_t(row) * BLOCK + 16 * vector) * 2 / (TYPE == KVType::f16 ? 1 : TYPE == KVType::q8 ? 2 : 4)); }
};

// Values of one head and block: a row is a token, a vector sixteen elements.
template <KVType TYPE>
struct ValueReader {
  const uint8_t* head;
  int dim;
  F32 at(int row, int vector) const {
    const size_t elements = size_t(dim) * BLOCK, at = size_t(row) * dim + 16 * vector;
    if constexpr (TYPE == KVType::f16) return load_f16(reinterpret_cast<const uint16_t*>(head) + at);
    const auto* scale = reinterpret_cast<const uint16_t*>(head + (TYPE == KVType::q8 ? elements : elements / 2));
    const F32 codes = TYPE == KVType::q8 ? load_i8(reinterpret_cast<const int8_t*>(head) + at)
                                         : centred_nibbles(head + at / 32 * 16, vector % 2);  // the halves of a group share bytes
    return mul(codes, splat_f16(scale[row * (dim / GROUP) + vector / 2]));
  }
  void ask(int row, int vector) const { __builtin_prefetch(head + (size_t(row) * dim + 16 * vector) * 2 / (TYPE == KVType::f16 ? 1 : TYPE == KVType::q8 ? 2 : 4)); }
};

template <class Reader>
inline FloatReader converted(const Reader& from, int rows, int vectors, std::vector<float>& out) {
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < vectors; v++) store(&out[(size_t(r) * vectors + v) * 16], from.at(r, v));
  return {out.data(), size_t(vectors) * 16};
}

// Largest codes of a quantised group, and the f16 scale that stands for it.
inline void quantize_kv(const float* x, int limit, int8_t* codes, uint16_t* scale) {
  const float greatest = reduce_max(max(abs(load(x)), abs(load(x + 16))));
  uint16_t h[16];
  float f[16];
  store_f16(h, splat(greatest / float(limit)));
  store(f, load_f16(h));
  *scale = h[0];
  const F32 inverse = splat(f[0] > 0.f ? 1.f / f[0] : 0.f);
  const F32 most = splat(float(limit)), least = splat(-float(limit));
  store_i8(codes, round(max(min(mul(load(x), inverse), most), least)));
  store_i8(codes + 16, round(max(min(mul(load(x + 16), inverse), most), least)));
}

inline void store_token(const KVShape& s, uint8_t* block, int kv_head, int token, const float* k, const float* v) {
  const int dim = s.head_dim;
  const size_t elements = size_t(dim) * BLOCK;
  uint8_t* keys = block + kv_head * head_bytes(s);
  uint8_t* values = keys + key_bytes(s);
  if (s.type == KVType::f16) {
    auto *ko = reinterpret_cast<uint16_t*>(keys), *vo = reinterpret_cast<uint16_t*>(values) + size_t(token) * dim;
    for (int d = 0; d < dim; d += 16) {
      uint16_t h[16];
      store_f16(h, load(k + d));
      for (int i = 0; i < 16; i++) ko[(d + i) * BLOCK + token] = h[i];
      store_f16(vo + d, load(v + d));
    }
    return;
  }
  const bool q4 = s.type == KVType::q4;
  auto* k_scale = reinterpret_cast<uint16_t*>(keys + (q4 ? elements / 2 : elements));
  auto* v_scale = reinterpret_cast<uint16_t*>(values + (q4 ? elements / 2 : elements));
  const size_t scales = elements / GROUP;
  uint16_t* outlier = k_scale + scales;
  auto* place = reinterpret_cast<uint8_t*>(outlier + KEY_OUTLIERS * scales);
  for (int d = 0; d < dim; d += GROUP) {
    int8_t codes[GROUP];
    float rest[GROUP];
    std::memcpy(rest, k + d, sizeof rest);
    for (int o = 0; o < KEY_OUTLIERS; o++) {
      int at = 0;
      for (int i = 1; i < GROUP; i++)
        if (std::fabs(rest[i]) > std::fabs(rest[at])) at = i;
      uint16_t h[16];
      store_f16(h, splat(rest[at]));
      outlier[o * scales + d / GROUP * BLOCK + token] = h[0];
      place[o * scales + d / GROUP * BLOCK + token] = uint8_t(at);
      rest[at] = 0.f;
    }
    quantize_kv(rest, q4 ? 7 : 127, codes, &k_scale[d / GROUP * BLOCK + token]);
    for (int i = 0; i < GROUP; i++) {
      if (q4) {
        uint8_t& byte = keys[(d + i) / 2 * BLOCK + token];
        const int shift = i % 2 * 4;
        byte = uint8_t((byte & (0xf0 >> shift)) | (codes[i] + 8) << shift);
      } else {
        keys[(d + i) * BLOCK + token] = uint8_t(codes[i]);
      }
    }
    quantize_kv(v + d, q4 ? 7 : 127, codes, &v_scale[token * (dim / GROUP) + d / GROUP]);
    uint8_t* out = values + (size_t(token) * dim + d) / (q4 ? 2 : 1);
    for (int i = 0; i < (q4 ? 16 : 32); i++) out[i] = q4 ? uint8_t((codes[i] + 8) | (codes[i + 16] + 8) << 4) : uint8_t(codes[i]);
  }
}

void store_kv(Pool& pool, const KVShape& s, const float* k, const float* v, const SpanRows* spans, int count) {
  const size_t width = size_t(s.kv_heads) * s.head_dim;
  // A task is one KV head of one span: no two tasks write to the same cache line.
  pool.run(count * s.kv_heads, [&](int task, int) {
    const SpanRows& span = spans[task / s.kv_heads];
    const int head = task % s.kv_heads;
    for (int r = 0; r < span.count; r++) {
      const int position = span.start + r;
      const size_t at = (span.first + r) * width + size_t(head) * s.head_dim;
      store_token(s, span.blocks[position / BLOCK], head, position % BLOCK, k + at, v + at);
    }
  });
}

// out[t][n] = sum over k of a[t][k] * b[k][n], k from first to last; with `more`, added to what out holds. `next` is what will be
// read after b.
template <int T, int N, class B>
inline void small_product(const float* a, size_t a_stride, const B& b, const B& next, int depth, int vector, float* out, size_t out_stride, bool more) {
  F32 acc[T][N];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) acc[t][n] = more ? load(out + t * out_stride + 16 * (vector + n)) : splat(0.f);
  for (int k = 0; k < depth; k++) {
    F32 v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) v[n] = b.at(k, vector + n);
    for (int n = 0; n < N; n += 2) next.ask(k, vector + n);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const F32 x = splat(a[t * a_stride + k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) acc[t][n] = fma(v[n], x, acc[t][n]);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(out + t * out_stride + 16 * (vector + n), acc[t][n]);
}

// rows x (16 * vectors): as many rows at a time as the registers hold.
template <class B>
inline void product(const float* a, size_t a_stride, int rows, const B& b, const B& next, int depth, int vectors, float* out, size_t out_stride, bool more) {
  for (int r = 0; r < rows;) {
    const auto some = [&](auto count) {
      constexpr int T = decltype(count)::value;
      const float* from = a + r * a_stride;
      float* to = out + r * out_stride;
      int v = 0;
      for (; v + 4 <= vectors; v += 4) small_product<T, 4>(from, a_stride, b, next, depth, v, to, out_stride, more);
      for (; v < vectors; v++) small_product<T, 1>(from, a_stride, b, next, depth, v, to, out_stride, more);
      r += T;
    };
    const int left = rows - r;
    if (left >= ATTENTION_ROWS) some(std::integral_constant<int, ATTENTION_ROWS>());
    else if (ATTENTION_ROWS > 4 && left >= 4) some(std::integral_constant<int, ATTENTION_ROWS < 4 ? ATTENTION_ROWS : 4>());
    else if (ATTENTION_ROWS > 3 && left == 3) some(std::integral_constant<int, ATTENTION_ROWS < 3 ? ATTENTION_ROWS : 3>());
    else if (ATTENTION_ROWS > 2 && left == 2) some(std::integral_constant<int, 2>());
    else some(std::integral_constant<int, 1>());
  }
}

inline F32 soft_cap(F32 s, float cap) {  // cap * tanh(s / cap)
  const F32 e = exponential(mul(s, splat(2.f / cap)));
  return mul(splat(cap), sub(splat(1.f), div(splat(2.f), ::everwarm::EVERWARM_ISA::add(e, splat(1.f)))));
}

// Scores of one query over the tokens [low, high) of a unit become 2^(score - m); the rest become 0. Returns m and the sum.
inline void soften(float* scores, int vectors, int low, int high, float softcap, float& m, float& l) {
  if (softcap > 0.f)
    for (int v = 0; v < vectors; v++) store(scores + 16 * v, mul(soft_cap(load(scores + 16 * v), softcap), splat(LOG2_E)));
  for (int j = 0; j < low; j++) scores[j] = -INFINITY;
  for (int j = high; j < 16 * vectors; j++) scores[j] = -INFINITY;  // also what lies behind the newest token
  F32 greatest = load(scores);
  for (int v = 1; v < vectors; v++) greatest = max(greatest, load(scores + 16 * v));
  m = reduce_max(greatest);
  F32 sum = splat(0.f);
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    const F32 e = power_of_two(sub(load(scores + 16 * v), splat(m)));
    store(scores + 16 * v, e);
    sum = ::everwarm::EVERWARM_ISA::add(sum, e);
  }
  l = reduce_add(sum);
}

// (m, l, o) so far, and one more unit.
inline void merge(float& m, float& l, float* o, float unit_m, float unit_l, const float* unit_o, int dim) {
  const float new_m = m > unit_m ? m : unit_m;
  float factors[16] = {m - new_m, unit_m - new_m};
  store(factors, power_of_two(load(factors)));
  const F32 old = splat(factors[0]), fresh = splat(factors[1]);
  for (int d = 0; d < dim; d += 16) store(o + d, fma(load(unit_o + d), fresh, mul(load(o + d), old)));
  l = std::fma(unit_l, factors[1], l * factors[0]);
  m = new_m;
}

struct AttentionScratch {
  std::vector<float> q, keys, values, scores, out, m, l, o, unit_m, unit_l, old, fresh;
};

// `merge` for all queries of a tile, sixteen at a time.
inline void merge_all(AttentionScratch& t, int queries, int dim) {
  for (int i = 0; i < queries; i += 16) {
    const F32 m = load(&t.m[i]), unit_m = load(&t.unit_m[i]), new_m = max(m, unit_m);
    const F32 old = power_of_two(sub(m, new_m)), fresh = power_of_two(sub(unit_m, new_m));
    store(&t.l[i], fma(load(&t.unit_l[i]), fresh, mul(load(&t.l[i]), old)));
    store(&t.m[i], new_m), store(&t.old[i], old), store(&t.fresh[i], fresh);
  }
  for (int i = 0; i < queries; i++) {
    const F32 old = splat(t.old[i]), fresh = splat(t.fresh[i]);
    float *o = &t.o[size_t(i) * dim], *unit_o = &t.out[size_t(i) * dim];
    for (int d = 0; d < dim; d += 16) store(o + d, fma(load(unit_o + d), fresh, mul(load(o + d), old)));
  }
}

constexpr int QUERIES = 96;  // query vectors (rows x heads that share a KV head) that are computed together

// All queries of rows [row, row + rows) that share one KV head, over the units [first, last). Units are merged into
// (m, l, o), or, if `partials` is given, left there one by one: per query and unit head_dim + 2 floats.
template <KVType TYPE>
void attend(const KVShape& s, const float* q, int heads, const SpanRows& span, int kv_head, int row, int rows, int first, int last,
                   float scale, int window, float softcap, AttentionScratch& t, float* partials) {
  const int dim = s.head_dim, shared = heads / s.kv_heads, queries = rows * shared, units = last - first;
  t.q.resize(size_t(queries) * dim), t.scores.resize(size_t(queries) * UNIT_TOKENS), t.out.resize(size_t(queries) * dim);
  t.keys.resize(size_t(dim) * BLOCK), t.values.resize(size_t(dim) * BLOCK);
  const size_t padded = round_up(queries, 16);
  t.m.assign(padded, -INFINITY), t.l.assign(padded, 0.f), t.o.assign(size_t(queries) * dim, 0.f);
  t.unit_m.assign(padded, -INFINITY), t.unit_l.assign(padded, 0.f), t.old.resize(padded), t.fresh.resize(padded);
  const float factor = softcap > 0.f ? scale : scale * LOG2_E;
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < shared; h++) {
      const float* from = q + (size_t(span.first + row + r) * heads + kv_head * shared + h) * dim;
      for (int d = 0; d < dim; d += 16) store(&t.q[(size_t(r) * shared + h) * dim + d], mul(load(from + d), splat(factor)));
    }
  const bool in_place = queries <= ATTENTION_ROWS;  // a few queries read KV where it lies; for more it is converted once
  const int newest = span.start + row + rows - 1;
  const int oldest = window > 0 && span.start + row + 1 - window > 0 ? (span.start + row + 1 - window) / BLOCK : 0;  // block that anyone sees
  for (int unit = first; unit < last; unit++) {
    const int from = unit * UNIT_TOKENS, tokens = newest + 1 - from < UNIT_TOKENS ? newest + 1 - from : UNIT_TOKENS;
    const int begin = unit * UNIT < oldest ? oldest : unit * UNIT, end = unit * UNIT + (tokens + BLOCK - 1) / BLOCK;
    const int vectors = (end - unit * UNIT) * (BLOCK / 16);
    const auto keys = [&](int b) { return KeyReader<TYPE>{span.blocks[b] + kv_head * head_bytes(s), dim}; };
    const auto values = [&](int b) { return ValueReader<TYPE>{span.blocks[b] + kv_head * head_bytes(s) + key_bytes(s), dim}; };
    for (int b = begin; b < end; b++) {
      float* scores = &t.scores[(b - unit * UNIT) * BLOCK];
      if (in_place) {
        const KeyReader<TYPE> next{b + 1 < end ? keys(b + 1).head : values(begin).head, dim};
        product(t.q.data(), dim, queries, keys(b), next, dim, BLOCK / 16, scores, UNIT_TOKENS, false);
      } else {
        const FloatReader floats = converted(keys(b), dim, BLOCK / 16, t.keys);
        product(t.q.data(), dim, queries, floats, floats, dim, BLOCK / 16, scores, UNIT_TOKENS, false);
      }
    }
    for (int i = 0; i < queries; i++) {
      const int position = span.start + row + i / shared;
      const int high = position + 1 - from < tokens ? position + 1 - from : tokens;
      const int low = window > 0 && position + 1 - window > from ? position + 1 - window - from : 0;
      if (low < high)
        soften(&t.scores[size_t(i) * UNIT_TOKENS], vectors, low, high, softcap, t.unit_m[i], t.unit_l[i]);
      else  // this query sees nothing of the unit: it will be merged with a weight of 0
        t.unit_m[i] = -INFINITY, t.unit_l[i] = 0.f, std::memset(&t.scores[size_t(i) * UNIT_TOKENS], 0, UNIT_TOKENS * 4);
    }
    for (int b = begin; b < end; b++) {
      const float* weights = &t.scores[(b - unit * UNIT) * BLOCK];
      const int count = from + tokens - b * BLOCK < BLOCK ? from + tokens - b * BLOCK : BLOCK;
      if (in_place) {
        const ValueReader<TYPE> next{b + 1 < end ? values(b + 1).head : unit + 1 < last ? keys(b + 1).head : values(b).head, dim};
        product(weights, UNIT_TOKENS, queries, values(b), next, count, dim / 16, t.out.data(), dim, b > begin);
      } else {
        const FloatReader floats = converted(values(b), count, dim / 16, t.values);
        product(weights, UNIT_TOKENS, queries, floats, floats, count, dim / 16, t.out.data(), dim, b > begin);
      }
    }
    if (partials) {
      for (int i = 0; i < queries; i++) {
        float* p = partials + (size_t(i) * units + (unit - first)) * (dim + 2);
        p[0] = t.unit_m[i], p[1] = t.unit_l[i];
        std::memcpy(p + 2, &t.out[size_t(i) * dim], dim * 4);
      }
    } else {
      merge_all(t, queries, dim);
    }
  }
}

inline void write_out(const float* o, float l, int dim, float* out) {
  const F32 inverse = splat(1.f / l);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(o + d), inverse));
}

struct AttentionTask {
  int span, kv_head, row, rows, first, last;
  size_t partials;  // offset, for a task that covers only some of the units
  bool split;
};

void attention(Pool& pool, const KVShape& s, const float* q, int heads, const SpanRows* spans, int count, float scale, int window,
               float softcap, float* out) {
  const int dim = s.head_dim, shared = heads / s.kv_heads;
  const int tile_rows = QUERIES / shared > 0 ? QUERIES / shared : 1;
  constexpr int SPLIT = 4;  // units per task where a few rows look back far
  std::vector<AttentionTask> tasks;
  size_t partial_floats = 0;
  for (int i = 0; i < count; i++) {
    const SpanRows& span = spans[i];
    for (int row = (span.count - 1) / tile_rows * tile_rows; row >= 0 && span.count; row -= tile_rows) {  // the costly ones first
      const int rows = span.count - row < tile_rows ? span.count - row : tile_rows;
      const int oldest = window > 0 && span.start + row + 1 - window > 0 ? (span.start + row + 1 - window) / UNIT_TOKENS : 0;
      const int last = (span.start + row + rows - 1) / UNIT_TOKENS + 1;
      const bool split = rows * shared <= QUERIES / 4 && last - oldest > SPLIT;
      for (int h = 0; h < s.kv_heads; h++)
        for (int first = oldest; first < last; first += split ? SPLIT : last - oldest) {
          const int end = split && first + SPLIT < last ? first + SPLIT : last;
          tasks.push_back({i, h, row, rows, first, end, partial_floats, split});
          if (split) partial_floats += size_t(rows) * shared * (end - first) * (dim + 2);
        }
    }
  }
  std::vector<float> partials(partial_floats);
  const auto out_at = [&](const AttentionTask& t, int query) {
    return out + (size_t(spans[t.span].first + t.row + query / shared) * heads + t.kv_head * shared + query % shared) * dim;
  };
  pool.run(int(tasks.size()), [&](int index, int) {
    static thread_local AttentionScratch scratch;
    const AttentionTask& t = tasks[index];
    const auto run = s.type == KVType::f16 ? attend<KVType::f16> : s.type == KVType::q8 ? attend<KVType::q8> : attend<KVType::q4>;
    run(s, q, heads, spans[t.span], t.kv_head, t.row, t.rows, t.first, t.last, scale, window, softcap, scratch,
        t.split ? &partials[t.partials] : nullptr);
    if (!t.split)
      for (int i = 0; i < t.rows * shared; i++) write_out(&scratch.o[size_t(i) * dim], scratch.l[i], dim, out_at(t, i));
  });
  // Pieces of one split follow each other in `tasks`, from the oldest unit to the newest.
  std::vector<size_t> starts;
  for (size_t i = 0; i < tasks.size(); i++) {
    const AttentionTask &a = tasks[i ? i - 1 : 0], &b = tasks[i];
    if (b.split && (i == 0 || !a.split || a.span != b.span || a.kv_head != b.kv_head || a.row != b.row)) starts.push_back(i);
  }
  pool.run(int(starts.size()), [&](int index, int) {
    static thread_local std::vector<float> o;
    const AttentionTask& head = tasks[starts[index]];
    for (int i = 0; i < head.rows * shared; i++) {
      float m = -INFINITY, l = 0.f;
      o.assign(dim, 0.f);
      for (size_t k = starts[index]; k < tasks.size() && tasks[k].split && tasks[k].span == head.span && tasks[k].kv_head == head.kv_head && tasks[k].row == head.row; k++) {
        const int units = tasks[k].last - tasks[k].first;
        for (int u = 0; u < units; u++) {
          const float* p = &partials[tasks[k].partials + (size_t(i) * units + u) * (dim + 2)];
          if (p[0] > -INFINITY) merge(m, l, o.data(), p[0], p[1], p + 2, dim);
        }
      }
      write_out(o.data(), l, dim, out_at(head, i));
    }
  });
}

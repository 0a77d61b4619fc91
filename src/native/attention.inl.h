// Keys, values and attention. Included once per instruction set, inside its namespace.
//
// One layer of a block holds, for each KV head, BLOCK tokens of keys transposed, [head_dim][BLOCK], then of values, [BLOCK][head_dim]:
// a vector is sixteen tokens of keys, or sixteen elements of a value, and nothing is shuffled. As f16 that is all; q8 and q4 hold
// codes and, behind them, an f16 scale per token and 32 elements: keys' scales [head_dim / 32][BLOCK], values' [BLOCK][head_dim / 32].
//
// A block is one unit of addition, at a fixed position: scores (times log2 e, so that powers of two do), their maximum m,
// l = sum of 2^(score - m), o = sum of 2^(score - m) v over its tokens from first to last; blocks are merged in order. So neither the
// rows of a batch nor the threads change a bit.

constexpr float LOG2_E = 1.44269504088896341f;

inline size_t head_bytes(const KVShape& s) {
  const size_t elements = size_t(s.head_dim) * BLOCK;
  switch (s.type) {
    case KVType::f16: return 2 * elements;
    case KVType::q8: return elements + 2 * elements / GROUP;
    case KVType::q4: return elements / 2 + 2 * elements / GROUP;
  }
  return 0;
}

// Keys of one head and block as floats, [head_dim][BLOCK].
inline void read_keys(const KVShape& s, const uint8_t* head, int tokens, float* out) {
  const int vectors = (tokens + 15) / 16;
  if (s.type == KVType::f16) {
    const auto* k = reinterpret_cast<const uint16_t*>(head);
    for (int d = 0; d < s.head_dim; d++)
      for (int v = 0; v < vectors; v++) store(out + d * BLOCK + 16 * v, load_f16(k + d * BLOCK + 16 * v));
    return;
  }
  const size_t elements = size_t(s.head_dim) * BLOCK;
  const auto* scale = reinterpret_cast<const uint16_t*>(head + (s.type == KVType::q8 ? elements : elements / 2));
  for (int d = 0; d < s.head_dim; d++)
    for (int v = 0; v < vectors; v++) {
      F32 codes;
      if (s.type == KVType::q8) {
        codes = load_i8(reinterpret_cast<const int8_t*>(head) + d * BLOCK + 16 * v);
      } else {  // rows 2i and 2i + 1 share bytes: low and high halves
        uint8_t nibble[16];
        for (int i = 0; i < 16; i++) nibble[i] = head[d / 2 * BLOCK + 16 * v + i] >> (d % 2 * 4) & 15;
        codes = sub(load_u8(nibble), splat(8.f));
      }
      store(out + d * BLOCK + 16 * v, mul(codes, load_f16(scale + d / GROUP * BLOCK + 16 * v)));
    }
}

// Values of one head and block as floats, [BLOCK][head_dim].
inline void read_values(const KVShape& s, const uint8_t* head, int tokens, float* out) {
  const int vectors = s.head_dim / 16;
  if (s.type == KVType::f16) {
    const auto* v = reinterpret_cast<const uint16_t*>(head);
    for (int i = 0; i < tokens * vectors; i++) store(out + 16 * i, load_f16(v + 16 * i));
    return;
  }
  const size_t elements = size_t(s.head_dim) * BLOCK;
  const auto* scale = reinterpret_cast<const uint16_t*>(head + (s.type == KVType::q8 ? elements : elements / 2));
  const int groups = s.head_dim / GROUP;
  for (int t = 0; t < tokens; t++)
    for (int v = 0; v < vectors; v++) {
      float sc[16];
      uint16_t h[16];
      for (auto& x : h) x = scale[t * groups + v / 2];
      store(sc, load_f16(h));
      F32 codes;
      const size_t at = size_t(t) * s.head_dim + 16 * v;
      if (s.type == KVType::q8) {
        codes = load_i8(reinterpret_cast<const int8_t*>(head) + at);
      } else {  // the halves of a group of 32 share bytes
        uint8_t nibble[16];
        for (int i = 0; i < 16; i++) nibble[i] = head[at / 32 * 16 + i] >> (v % 2 * 4) & 15;
        codes = sub(load_u8(nibble), splat(8.f));
      }
      store(out + at, mul(codes, load(sc)));
    }
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
  uint8_t* keys = block + 2 * kv_head * head_bytes(s);
  uint8_t* values = keys + head_bytes(s);
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
  for (int d = 0; d < dim; d += GROUP) {
    int8_t codes[GROUP];
    quantize_kv(k + d, q4 ? 7 : 127, codes, &k_scale[d / GROUP * BLOCK + token]);
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

// out[t][n] = sum over k of a[t][k] * b[k][n], k from first to last.
inline F32 load_any(const float* p) { return load(p); }
inline F32 load_any(const uint16_t* p) { return load_f16(p); }

template <int T, int N, class B>
inline void small_product(const float* a, size_t a_stride, const B* b, size_t b_stride, int depth, float* out, size_t out_stride) {
  F32 acc[T][N];
  for (auto& r : acc)
    for (auto& x : r) x = splat(0.f);
  for (int k = 0; k < depth; k++) {
    F32 v[N];
    for (int n = 0; n < N; n++) v[n] = load_any(b + k * b_stride + 16 * n);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const F32 x = splat(a[t * a_stride + k]);
      for (int n = 0; n < N; n++) acc[t][n] = fma(v[n], x, acc[t][n]);
    }
  }
  for (int t = 0; t < T; t++)
    for (int n = 0; n < N; n++) store(out + t * out_stride + 16 * n, acc[t][n]);
}

template <int N, class B>
inline int product_rows(const float* a, size_t a_stride, int rows, const B* b, size_t b_stride, int depth, float* out, size_t out_stride) {
  if (rows >= ATTENTION_ROWS) return small_product<ATTENTION_ROWS, N>(a, a_stride, b, b_stride, depth, out, out_stride), ATTENTION_ROWS;
  if (rows >= 3) return small_product<3, N>(a, a_stride, b, b_stride, depth, out, out_stride), 3;
  return small_product<1, N>(a, a_stride, b, b_stride, depth, out, out_stride), 1;
}

// rows x (16 * vectors), four vectors at a time.
template <class B>
inline void any_product(const float* a, size_t a_stride, int rows, const B* b, size_t b_stride, int depth, int vectors, float* out, size_t out_stride) {
  for (int n = 0; n < vectors; n += 4)
    for (int r = 0; r < rows;) {
      const float* ar = a + r * a_stride;
      const B* bn = b + 16 * n;
      float* o = out + r * out_stride + 16 * n;
      switch (vectors - n) {
        case 1: r += product_rows<1>(ar, a_stride, rows - r, bn, b_stride, depth, o, out_stride); break;
        case 2: r += product_rows<2>(ar, a_stride, rows - r, bn, b_stride, depth, o, out_stride); break;
        case 3: r += product_rows<3>(ar, a_stride, rows - r, bn, b_stride, depth, o, out_stride); break;
        default: r += product_rows<4>(ar, a_stride, rows - r, bn, b_stride, depth, o, out_stride); break;
      }
    }
}

inline F32 soft_cap(F32 s, float cap) {  // cap * tanh(s / cap)
  const F32 e = exponential(mul(s, splat(2.f / cap)));
  return mul(splat(cap), sub(splat(1.f), div(splat(2.f), ::everwarm::EVERWARM_ISA::add(e, splat(1.f)))));
}

// Scores of one query over the tokens [low, high) of a block become 2^(score - m); the rest become 0. Returns m and the sum.
inline void soften(float* scores, int vectors, int low, int high, float softcap, float& m, float& l) {
  if (softcap > 0.f)
    for (int v = 0; v < vectors; v++) store(scores + 16 * v, mul(soft_cap(load(scores + 16 * v), softcap), splat(LOG2_E)));
  for (int j = 0; j < low; j++) scores[j] = -INFINITY;
  for (int j = high; j < 16 * vectors; j++) scores[j] = -INFINITY;  // also what lies behind the newest token
  F32 greatest = load(scores);
  for (int v = 1; v < vectors; v++) greatest = max(greatest, load(scores + 16 * v));
  m = reduce_max(greatest);
  F32 sum = splat(0.f);
  for (int v = 0; v < vectors; v++) {
    const F32 e = power_of_two(sub(load(scores + 16 * v), splat(m)));
    store(scores + 16 * v, e);
    sum = ::everwarm::EVERWARM_ISA::add(sum, e);
  }
  l = reduce_add(sum);
}

// (m, l, o) so far, and one more block.
inline void merge(float& m, float& l, float* o, float block_m, float block_l, const float* block_o, int dim) {
  const float new_m = m > block_m ? m : block_m;
  float factors[16] = {m - new_m, block_m - new_m};
  store(factors, power_of_two(load(factors)));
  const F32 old = splat(factors[0]), fresh = splat(factors[1]);
  for (int d = 0; d < dim; d += 16) store(o + d, fma(load(block_o + d), fresh, mul(load(o + d), old)));
  l = std::fma(block_l, factors[1], l * factors[0]);
  m = new_m;
}

struct AttentionScratch {
  std::vector<float> q, keys, values, scores, out, m, l, o, block_m, block_l, old, fresh;
};

// `merge` for all queries of a tile, sixteen at a time.
inline void merge_all(AttentionScratch& t, int queries, int dim) {
  for (int i = 0; i < queries; i += 16) {
    const F32 m = load(&t.m[i]), block_m = load(&t.block_m[i]), new_m = max(m, block_m);
    const F32 old = power_of_two(sub(m, new_m)), fresh = power_of_two(sub(block_m, new_m));
    store(&t.l[i], fma(load(&t.block_l[i]), fresh, mul(load(&t.l[i]), old)));
    store(&t.m[i], new_m), store(&t.old[i], old), store(&t.fresh[i], fresh);
  }
  for (int i = 0; i < queries; i++) {
    const F32 old = splat(t.old[i]), fresh = splat(t.fresh[i]);
    float *o = &t.o[size_t(i) * dim], *block_o = &t.out[size_t(i) * dim];
    for (int d = 0; d < dim; d += 16) store(o + d, fma(load(block_o + d), fresh, mul(load(o + d), old)));
  }
}

constexpr int QUERIES = 48;  // query vectors (rows x heads that share a KV head) that are computed together

// All queries of rows [row, row + rows) that share one KV head, over the blocks [first, last). Blocks are merged into
// (m, l, o), or, if `partials` is given, left there one by one: per query and block head_dim + 2 floats.
inline void attend(const KVShape& s, const float* q, int heads, const SpanRows& span, int kv_head, int row, int rows, int first, int last,
                   float scale, int window, float softcap, AttentionScratch& t, float* partials) {
  const int dim = s.head_dim, shared = heads / s.kv_heads, queries = rows * shared, blocks = last - first;
  t.q.resize(size_t(queries) * dim), t.scores.resize(size_t(queries) * BLOCK), t.out.resize(size_t(queries) * dim);
  t.keys.resize(size_t(dim) * BLOCK), t.values.resize(size_t(dim) * BLOCK);
  const size_t padded = round_up(queries, 16);
  t.m.assign(padded, -INFINITY), t.l.assign(padded, 0.f), t.o.assign(size_t(queries) * dim, 0.f);
  t.block_m.assign(padded, -INFINITY), t.block_l.assign(padded, 0.f), t.old.resize(padded), t.fresh.resize(padded);
  const float factor = softcap > 0.f ? scale : scale * LOG2_E;
  for (int r = 0; r < rows; r++)
    for (int h = 0; h < shared; h++) {
      const float* from = q + (size_t(span.first + row + r) * heads + kv_head * shared + h) * dim;
      for (int d = 0; d < dim; d += 16) store(&t.q[(size_t(r) * shared + h) * dim + d], mul(load(from + d), splat(factor)));
    }
  for (int b = first; b < last; b++) {
    const int from = b * BLOCK, newest = span.start + row + rows - 1;
    const int tokens = newest + 1 - from < BLOCK ? newest + 1 - from : BLOCK, vectors = (tokens + 15) / 16;
    const uint8_t* keys = span.blocks[b] + 2 * kv_head * head_bytes(s);
    // A few queries read f16 where it lies; for more it is converted once.
    const bool in_place = s.type == KVType::f16 && queries <= ATTENTION_ROWS;
    if (in_place) {
      any_product(t.q.data(), dim, queries, reinterpret_cast<const uint16_t*>(keys), BLOCK, dim, vectors, t.scores.data(), BLOCK);
    } else {
      read_keys(s, keys, tokens, t.keys.data());
      any_product(t.q.data(), dim, queries, t.keys.data(), BLOCK, dim, vectors, t.scores.data(), BLOCK);
    }
    for (int i = 0; i < queries; i++) {
      const int position = span.start + row + i / shared;
      const int high = position + 1 - from < tokens ? position + 1 - from : tokens;
      const int low = window > 0 && position + 1 - window > from ? position + 1 - window - from : 0;
      if (low < high)
        soften(&t.scores[size_t(i) * BLOCK], vectors, low, high, softcap, t.block_m[i], t.block_l[i]);
      else  // this query sees nothing of the block: it will be merged with a weight of 0
        t.block_m[i] = -INFINITY, t.block_l[i] = 0.f, std::memset(&t.scores[size_t(i) * BLOCK], 0, BLOCK * 4);
    }
    const uint8_t* values = keys + head_bytes(s);
    if (in_place) {
      any_product(t.scores.data(), BLOCK, queries, reinterpret_cast<const uint16_t*>(values), dim, tokens, dim / 16, t.out.data(), dim);
    } else {
      read_values(s, values, tokens, t.values.data());
      any_product(t.scores.data(), BLOCK, queries, t.values.data(), dim, tokens, dim / 16, t.out.data(), dim);
    }
    if (partials) {
      for (int i = 0; i < queries; i++) {
        float* p = partials + (size_t(i) * blocks + (b - first)) * (dim + 2);
        p[0] = t.block_m[i], p[1] = t.block_l[i];
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
  size_t partials;  // offset, for a task that covers only some of the blocks
  bool split;
};

void attention(Pool& pool, const KVShape& s, const float* q, int heads, const SpanRows* spans, int count, float scale, int window,
               float softcap, float* out) {
  const int dim = s.head_dim, shared = heads / s.kv_heads;
  const int tile_rows = QUERIES / shared > 0 ? QUERIES / shared : 1;
  constexpr int SPLIT = 8;  // blocks per task where a few rows look back far
  std::vector<AttentionTask> tasks;
  size_t partial_floats = 0;
  for (int i = 0; i < count; i++) {
    const SpanRows& span = spans[i];
    for (int row = (span.count - 1) / tile_rows * tile_rows; row >= 0 && span.count; row -= tile_rows) {  // the costly ones first
      const int rows = span.count - row < tile_rows ? span.count - row : tile_rows;
      const int oldest = window > 0 && span.start + row + 1 - window > 0 ? (span.start + row + 1 - window) / BLOCK : 0;
      const int last = (span.start + row + rows - 1) / BLOCK + 1;
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
    attend(s, q, heads, spans[t.span], t.kv_head, t.row, t.rows, t.first, t.last, scale, window, softcap, scratch,
           t.split ? &partials[t.partials] : nullptr);
    if (!t.split)
      for (int i = 0; i < t.rows * shared; i++) write_out(&scratch.o[size_t(i) * dim], scratch.l[i], dim, out_at(t, i));
  });
  // Pieces of one split follow each other in `tasks`, from the oldest block to the newest.
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
        const int blocks = tasks[k].last - tasks[k].first;
        for (int b = 0; b < blocks; b++) {
          const float* p = &partials[tasks[k].partials + (size_t(i) * blocks + b) * (dim + 2)];
          if (p[0] > -INFINITY) merge(m, l, o.data(), p[0], p[1], p + 2, dim);
        }
      }
      write_out(o.data(), l, dim, out_at(head, i));
    }
  });
}

// Keys, values and attention. Included once per instruction set, inside its namespace.
//
// Attention computes on integers of 16 bits: a dot product of pairs is exact, the same on every instruction set, and twice as fast as
// multiply-adds of floats. A key is codes * 2^e with a norm of at most CODE_NORM, so that no product with a query overflows; a value
// is codes * 2^e of at most VALUE_LIMIT, so that BLOCK of them fit into a sum. Both exponents are kept per token and head.
//
// One layer of a block holds, for each KV head, BLOCK tokens of keys transposed, [key_dim][BLOCK], then of values, [BLOCK][value_dim],
// then BLOCK exponents of keys and BLOCK of values, a byte each. As f16 (16 bits an element) keys and values are codes in pairs of rows:
// [key_dim / 2][BLOCK][2] and [BLOCK / 2][value_dim][2]. q8 and q4 hold smaller codes and, behind them, an f16 scale per token and 32
// elements: keys' scales [key_dim / 32][BLOCK], values' [BLOCK][value_dim / 32]. Behind the keys' scales come the greatest elements of
// each 32: f16 values [KEY_OUTLIERS][key_dim / 32][BLOCK], then their places among the 32 in the same order, a byte each. They are
// converted to pairs before they are used. Of a latent there are keys only; its values are the first value_dim elements of them, turned
// around before they are used.
//
// UNIT blocks are one unit of addition, at a fixed position: scores (times log2 e, so that powers of two do) plus the exponent of the
// value, their maximum m + WEIGHT_BITS, weights 2^(score - m) rounded to integers, l = the sum of weights without that exponent,
// o = sum of weight * code over its tokens from first to last; units are merged in order. So neither the rows of a batch nor the
// threads change a bit.

constexpr float LOG2_E = 1.44269504088896341f;
constexpr int UNIT = 2, UNIT_TOKENS = UNIT * BLOCK;  // blocks that share one maximum: part of the numerics

constexpr float CODE_NORM = 32000.f;   // of queries and keys: a dot product is below 2^30, also if rounding adds a little
constexpr float VALUE_LIMIT = 2040.f;  // 64 tokens * 2^14 * 2047 < 2^31, and q8 and q4 may round up
constexpr float WEIGHT_BITS = 14.f;    // the greatest weight of a unit is 2^14
// Of a latent, whose codes are values as well: 64 tokens * 2^11 * 16000 < 2^31.
constexpr float LATENT_NORM = 16000.f, LATENT_WEIGHT_BITS = 11.f;
constexpr int8_t NOT_FINITE = 127;     // exponent of keys and values of a token that holds NaN or infinity; codes are 0

inline size_t head_bytes(const KVShape& s) { return key_bytes(s) + value_bytes(s) + exponent_bytes(); }

// The least e with x <= limit * 2^e.
inline int8_t exponent_for(float x, float limit) {
  if (!(x <= FLT_MAX)) return NOT_FINITE;
  const float most = std::fmax(x / limit, 0x1p-40f);
  uint32_t bits;
  std::memcpy(&bits, &most, 4);
  return int8_t(int((bits + 0x7fffff) >> 23) - 127);
}

inline F32 two_to(F32 e) { return scale_by_power(splat(1.f), round(e)); }  // for whole numbers; 0 for -NOT_FINITE

// The greatest magnitude; NaN if any is not finite.
inline float greatest_of(const float* x, int count) {
  F32 most = splat(0.f), poison = splat(0.f);  // a maximum can lose a NaN
  for (int i = 0; i < count; i += 16) most = max(most, abs(load(x + i))), poison = fma(load(x + i), splat(0.f), poison);
  return reduce_max(most) + reduce_add(poison);
}

// Sixteen codes of 4 bits, minus 8: the lower or the upper halves of sixteen bytes.
inline F32 centred_nibbles(const uint8_t* p, int upper) { return sub(upper ? load_high_nibbles(p) : load_low_nibbles(p), splat(8.f)); }

// Keys of one head and block in q8 or q4: a row is an element of the head, a vector sixteen tokens.
template <KVType TYPE>
struct KeyReader {
  const uint8_t* head;
  int dim;
  F32 at(int row, int vector) const {
    const size_t elements = size_t(dim) * BLOCK, at = size_t(row) * BLOCK + 16 * vector;
    const size_t scales = elements / GROUP, group = size_t(row / GROUP) * BLOCK + 16 * vector;
    const auto* scale = reinterpret_cast<const uint16_t*>(head + (TYPE == KVType::q8 ? elements : elements / 2));
    const auto* outlier = scale + scales;
    const auto* place = reinterpret_cast<const uint8_t*>(outlier + KEY_OUTLIERS * scales);
    const F32 codes = TYPE == KVType::q8 ? load_i8(reinterpret_cast<const int8_t*>(head) + at)
                                         : centred_nibbles(head + row / 2 * BLOCK + 16 * vector, row % 2);  // two rows share bytes
    F32 keys = mul(codes, load_f16(scale + group));
    for (int i = 0; i < KEY_OUTLIERS; i++)
      keys = replace_where(keys, place + i * scales + group, row % GROUP, outlier + i * scales + group);
    return keys;
  }
};

// Values of one head and block in q8 or q4: a row is a token, a vector sixteen elements.
template <KVType TYPE>
struct ValueReader {
  const uint8_t* head;
  int dim;
  F32 at(int row, int vector) const {
    const size_t elements = size_t(dim) * BLOCK, at = size_t(row) * dim + 16 * vector;
    const auto* scale = reinterpret_cast<const uint16_t*>(head + (TYPE == KVType::q8 ? elements : elements / 2));
    const F32 codes = TYPE == KVType::q8 ? load_i8(reinterpret_cast<const int8_t*>(head) + at)
                                         : centred_nibbles(head + at / 32 * 16, vector % 2);  // the halves of a group share bytes
    return mul(codes, splat_f16(scale[row * (dim / GROUP) + vector / 2]));
  }
};

// q8 or q4 as pairs of 16 bits, with the exponents of the block's keys, or the inverse scales of its values.
template <KVType TYPE>
void convert_keys(const uint8_t* head, int dim, const int8_t* exponents, uint8_t* out) {
  const KeyReader<TYPE> keys{head, dim};
  for (int v = 0; v < BLOCK / 16; v++) {
    const F32 by = two_to(sub(splat(0.f), load_i8(exponents + 16 * v)));
    for (int d = 0; d < dim; d += 2)
      store_bytes(out + (size_t(d) / 2 * (BLOCK / 16) + v) * 64, pairs(round(mul(keys.at(d, v), by)), round(mul(keys.at(d + 1, v), by))));
  }
}

template <KVType TYPE>
void convert_values(const uint8_t* head, int dim, const float* inverse, uint8_t* out) {
  const ValueReader<TYPE> values{head, dim};
  for (int t = 0; t < BLOCK; t += 2)
    for (int v = 0; v < dim / 16; v++)
      store_bytes(out + (size_t(t) / 2 * (dim / 16) + v) * 64,
                  pairs(round(mul(values.at(t, v), splat(inverse[t]))), round(mul(values.at(t + 1, v), splat(inverse[t + 1])))));
}

// The first `dim` elements of keys, in pairs of elements, as values, in pairs of tokens.
inline void turn_around(const uint8_t* keys, int dim, uint8_t* out) {
  for (int k = 0; k < dim / 2; k += 8)  // a word is two elements of one token, and the same two of the next
    for (int i = 0; i < BLOCK / 2; i += 8)
      turn_square(keys + (size_t(k) * BLOCK + 2 * i) * 4, BLOCK * 4, out + (size_t(i) * dim + 2 * k) * 4, size_t(dim) * 4);
}

// What a unit's exponents mean. Tokens that nobody has written may have any: their scores are not used.
struct UnitScales {
  float key[UNIT_TOKENS];       // 2^e of keys
  float exponent[UNIT_TOKENS];  // of values; infinite if the token is not finite, so that it outweighs all others
  float inverse[UNIT_TOKENS];   // 2^-e of values

  void set(int token, const int8_t* exponents) {
    for (int i = 0; i < BLOCK; i += 16) {
      const F32 e = max(load_i8(exponents + BLOCK + i), splat(-100.f));
      store(key + token + i, two_to(load_i8(exponents + i)));
      store(exponent + token + i, ::everwarm::EVERWARM_ISA::add(e, keep_if_at_least(splat(INFINITY), e, NOT_FINITE)));
      store(inverse + token + i, two_to(sub(splat(0.f), e)));
    }
  }
};

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

// A latent has one exponent for its key and its value: v is its beginning then.
inline void store_token(const KVShape& s, uint8_t* block, int kv_head, int token, const float* k, const float* v) {
  const int dim = s.key_dim, value_dim = s.latent ? 0 : s.value_dim;
  uint8_t* keys = block + kv_head * head_bytes(s);
  uint8_t* values = keys + key_bytes(s);
  auto* exponents = reinterpret_cast<int8_t*>(values + value_bytes(s));
  int8_t &k_exponent = exponents[token], &v_exponent = exponents[BLOCK + token];
  k_exponent = exponent_for(std::sqrt(sum_of_squares(k, dim)), s.latent ? LATENT_NORM : CODE_NORM);
  v_exponent = s.latent ? k_exponent : exponent_for(greatest_of(v, value_dim), VALUE_LIMIT);
  if (k_exponent == NOT_FINITE || v_exponent == NOT_FINITE) k_exponent = v_exponent = NOT_FINITE;
  if (s.type == KVType::f16) {
    auto *ko = reinterpret_cast<int16_t*>(keys), *vo = reinterpret_cast<int16_t*>(values) + token / 2 * 2 * value_dim + token % 2;
    const F32 k_inverse = two_to(splat(-k_exponent)), v_inverse = two_to(splat(-v_exponent));
    const auto code = [&](const float* x, F32 inverse) { return k_exponent == NOT_FINITE ? isplat(0) : round(mul(load(x), inverse)); };
    for (int d = 0; d < dim; d += 16) {
      int16_t codes[16];
      store_i16(codes, code(k + d, k_inverse));
      for (int i = 0; i < 16; i += 2) std::memcpy(ko + (size_t(d + i) / 2 * BLOCK + token) * 2, codes + i, 4);
    }
    for (int d = 0; d < value_dim; d += 16) {
      int16_t codes[16];
      store_i16(codes, code(v + d, v_inverse));
      for (int i = 0; i < 16; i++) vo[(d + i) * 2] = codes[i];
    }
    return;
  }
  const bool q4 = s.type == KVType::q4;
  auto* k_scale = reinterpret_cast<uint16_t*>(keys + code_bytes(s.type, dim));
  auto* v_scale = reinterpret_cast<uint16_t*>(values + code_bytes(s.type, value_dim));
  const size_t scales = scale_count(s.type, dim);
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
  }
  for (int d = 0; d < value_dim; d += GROUP) {
    int8_t codes[GROUP];
    quantize_kv(v + d, q4 ? 7 : 127, codes, &v_scale[token * (value_dim / GROUP) + d / GROUP]);
    uint8_t* out = values + (size_t(token) * value_dim + d) / (q4 ? 2 : 1);
    for (int i = 0; i < (q4 ? 16 : 32); i++) out[i] = q4 ? uint8_t((codes[i] + 8) | (codes[i + 16] + 8) << 4) : uint8_t(codes[i]);
  }
}

void store_kv(Pool& pool, const KVShape& s, const float* k, const float* v, const SpanRows* spans, int count) {
  // A task is one KV head of one span: no two tasks write to the same cache line.
  pool.run(count * s.kv_heads, [&](int task, int) {
    const SpanRows& span = spans[task / s.kv_heads];
    const int head = task % s.kv_heads;
    for (int r = 0; r < span.count; r++) {
      const int position = span.start + r;
      const size_t at = size_t(span.first + r) * s.kv_heads + head;
      store_token(s, span.blocks[position / BLOCK], head, position % BLOCK, k + at * s.key_dim, v ? v + at * s.value_dim : nullptr);
    }
  });
}

// sum over k of a[t][k] * b[k][n], for T rows and 16 * N columns from `vector` on; finish(t, n, sum) takes it. Both are in pairs:
// b is [depth / 2][16 * vectors][2]. If `next` is given it is laid out like b and will be read soon: it is far, and the hardware
// follows a stream to the end of its page only.
template <int T, int N, class Finish>
inline void small_product(const int16_t* a, size_t a_stride, const uint8_t* b, const uint8_t* next, int pairs, int vectors, int vector,
                          Finish&& finish) {
  I32 acc[T][N];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) acc[t][n] = isplat(0);
  for (int k = 0; k < pairs; k++) {
    const size_t at = (size_t(k) * vectors + vector) * 64;
    Bytes v[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) v[n] = load_bytes(b + at + 64 * n);
    if (next)
      for (int n = 0; n < N; n++) __builtin_prefetch(next + at + 64 * n, 0, 2);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const Bytes x = splat_quad(reinterpret_cast<const int8_t*>(a + t * a_stride + 2 * k));
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) acc[t][n] = dot_pairs(acc[t][n], v[n], x);
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) finish(t, n, acc[t][n]);
}

// rows x (16 * vectors): as many rows at a time as the registers hold. finish(row, vector, sum) takes the sums.
template <class Finish>
inline void product(const int16_t* a, size_t a_stride, int rows, const uint8_t* b, const uint8_t* next, int pairs, int vectors,
                    Finish&& finish) {
  for (int r = 0; r < rows;) {
    const auto some = [&](auto count) {
      constexpr int T = decltype(count)::value;
      const int16_t* from = a + r * a_stride;
      int v = 0;
      const auto done = [&](int t, int n, I32 sum) { finish(r + t, v + n, sum); };
      for (; v + 4 <= vectors; v += 4) small_product<T, 4>(from, a_stride, b, next, pairs, vectors, v, done);
      for (; v < vectors; v++) small_product<T, 1>(from, a_stride, b, next, pairs, vectors, v, done);
      r += T;
    };
    const int left = rows - r;
    if (left >= ATTENTION_ROWS)
      some(std::integral_constant<int, ATTENTION_ROWS>());
    else if (ATTENTION_ROWS > 4 && left >= 4)
      some(std::integral_constant<int, (ATTENTION_ROWS < 4 ? ATTENTION_ROWS : 4)>());
    else if (ATTENTION_ROWS > 3 && left == 3)
      some(std::integral_constant<int, (ATTENTION_ROWS < 3 ? ATTENTION_ROWS : 3)>());
    else if (ATTENTION_ROWS > 2 && left == 2)
      some(std::integral_constant<int, 2>());
    else
      some(std::integral_constant<int, 1>());
  }
}

// Integer scores of one query over the tokens [low, high) of a unit become weights 2^(score + exponent - m), the rest become 0.
// `factor` makes a score of an integer. Returns m and the sum of 2^(score - m).
inline void soften(const int32_t* integers, const UnitScales& unit, int vectors, int low, int high, float factor, float softcap,
                   float weight_bits, int16_t* weights, float& m, float& l) {
  float scores[UNIT_TOKENS] = {};
  for (int v = 0; v < vectors; v++) {
    const F32 integer = to_f32(iload(integers + 16 * v)), scale = mul(load(unit.key + 16 * v), splat(factor));
    const F32 exponent = load(unit.exponent + 16 * v);
    if (softcap > 0.f)
      store(scores + 16 * v, fma(soft_cap(mul(integer, scale), softcap), splat(LOG2_E), exponent));
    else
      store(scores + 16 * v, fma(integer, scale, exponent));
  }
  for (int j = 0; j < low; j++) scores[j] = -INFINITY;
  for (int j = high; j < 16 * vectors; j++) scores[j] = -INFINITY;  // also what lies behind the newest token
  F32 greatest = load(scores);
  for (int v = 1; v < vectors; v++) greatest = max(greatest, load(scores + 16 * v));
  m = reduce_max(greatest) - weight_bits;
  F32 sum = splat(0.f);
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) {
    const F32 weight = power_of_two(sub(load(scores + 16 * v), splat(m)));
    store_i16(weights + 16 * v, round(weight));
    sum = fma(weight, load(unit.inverse + 16 * v), sum);
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
  std::vector<int16_t> q, weights;
  std::vector<int32_t> scores;
  std::vector<uint8_t> keys, values;
  std::vector<const uint8_t*> order;
  std::vector<float> factors, out, m, l, o, unit_m, unit_l, old, fresh;
  UnitScales unit;
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

constexpr size_t STEPS_AHEAD = 2;  // a step is the keys or the values of one block and head
constexpr int QUERIES = 96;  // query vectors (rows x heads that share a KV head) that are computed together

// All queries of rows [row, row + rows) that share one KV head, over the units [first, last). Units are merged into
// (m, l, o), or, if `partials` is given, left there one by one: per query and unit value_dim + 2 floats.
template <KVType TYPE>
void attend(const KVShape& s, const float* q, int heads, const SpanRows& span, int kv_head, int row, int rows, int first, int last,
            float scale, int window, float softcap, AttentionScratch& t, float* partials) {
  const int dim = s.key_dim, value_dim = s.value_dim, shared = heads / s.kv_heads, queries = rows * shared, units = last - first;
  const float weight_bits = s.latent ? LATENT_WEIGHT_BITS : WEIGHT_BITS;
  t.q.resize(size_t(queries) * dim), t.factors.resize(queries), t.out.resize(size_t(queries) * value_dim);
  t.scores.resize(size_t(queries) * UNIT_TOKENS), t.weights.resize(size_t(queries) * UNIT_TOKENS);
  const size_t padded = round_up(queries, 16);
  t.m.assign(padded, -INFINITY), t.l.assign(padded, 0.f), t.o.assign(size_t(queries) * value_dim, 0.f);
  t.unit_m.assign(padded, -INFINITY), t.unit_l.assign(padded, 0.f), t.old.resize(padded), t.fresh.resize(padded);
  for (int i = 0; i < queries; i++) {
    const float* from = q + (size_t(span.first + row + i / shared) * heads + kv_head * shared + i % shared) * dim;
    const float norm = std::sqrt(sum_of_squares(from, dim));
    const F32 inverse = splat(norm > 0.f ? CODE_NORM / norm : 0.f);
    t.factors[i] = norm / CODE_NORM * (softcap > 0.f ? scale : scale * LOG2_E);
    for (int d = 0; d < dim; d += 16) store_i16(&t.q[size_t(i) * dim + d], round(mul(load(from + d), inverse)));
  }
  const int newest = span.start + row + rows - 1;
  const int oldest =
      window > 0 && span.start + row + 1 - window > 0 ? (span.start + row + 1 - window) / BLOCK : 0;  // block that anyone sees
  const auto head_of = [&](int b) { return span.blocks[b] + kv_head * head_bytes(s); };
  const auto exponents_of = [&](int b) { return reinterpret_cast<const int8_t*>(head_of(b) + key_bytes(s) + value_bytes(s)); };
  const auto keys = [&](int b) -> const uint8_t* {
    if constexpr (TYPE == KVType::f16) return head_of(b);
    t.keys.resize(size_t(dim) * BLOCK * 2);
    convert_keys<TYPE>(head_of(b), dim, exponents_of(b), t.keys.data());
    return t.keys.data();
  };
  const auto values = [&](int b, const float* inverse) -> const uint8_t* {
    if (s.latent) {
      t.values.resize(size_t(value_dim) * BLOCK * 2);
      turn_around(keys(b), value_dim, t.values.data());
      return t.values.data();
    }
    if constexpr (TYPE == KVType::f16) return head_of(b) + key_bytes(s);
    t.values.resize(size_t(value_dim) * BLOCK * 2);
    convert_values<TYPE>(head_of(b) + key_bytes(s), value_dim, inverse, t.values.data());
    return t.values.data();
  };
  const auto blocks_of = [&](int unit) {
    const int behind = newest / BLOCK + 1, begin = unit * UNIT < oldest ? oldest : unit * UNIT;
    return std::make_pair(begin, behind < (unit + 1) * UNIT ? behind : (unit + 1) * UNIT);
  };
  // A few queries are done faster than memory answers: ask for what is read STEPS_AHEAD later, into the second-level cache.
  t.order.clear();
  if (TYPE == KVType::f16 && queries <= ATTENTION_ROWS)
    for (int unit = first; unit < last; unit++)
      for (int part = 0; part < (s.latent ? 1 : 2); part++) {
        const auto [begin, end] = blocks_of(unit);
        for (int b = begin; b < end; b++) t.order.push_back(head_of(b) + part * key_bytes(s));
      }
  size_t step = STEPS_AHEAD - 1;
  const auto next = [&]() -> const uint8_t* { return ++step < t.order.size() ? t.order[step] : nullptr; };
  for (int unit = first; unit < last; unit++) {
    const int from = unit * UNIT_TOKENS, tokens = newest + 1 - from < UNIT_TOKENS ? newest + 1 - from : UNIT_TOKENS;
    const auto blocks = blocks_of(unit);
    const int begin = blocks.first, end = blocks.second;
    const int vectors = (end - unit * UNIT) * (BLOCK / 16);
    for (int b = begin; b < end; b++) {
      const int at = (b - unit * UNIT) * BLOCK;
      t.unit.set(at, exponents_of(b));
      product(t.q.data(), dim, queries, keys(b), next(), dim / 2, BLOCK / 16,
              [&](int query, int v, I32 sum) { istore(&t.scores[size_t(query) * UNIT_TOKENS + at + 16 * v], sum); });
    }
    for (int i = 0; i < queries; i++) {
      const int position = span.start + row + i / shared;
      const int high = position + 1 - from < tokens ? position + 1 - from : tokens;
      const int low = window > 0 && position + 1 - window > from ? position + 1 - window - from : 0;
      int16_t* weights = &t.weights[size_t(i) * UNIT_TOKENS];
      if (low < high)
        soften(&t.scores[size_t(i) * UNIT_TOKENS], t.unit, vectors, low, high, t.factors[i], softcap, weight_bits, weights, t.unit_m[i],
               t.unit_l[i]);
      else  // this query sees nothing of the unit: it will be merged with a weight of 0
        t.unit_m[i] = -INFINITY, t.unit_l[i] = 0.f, std::memset(weights, 0, UNIT_TOKENS * 2);
    }
    for (int b = begin; b < end; b++) {
      const int at = (b - unit * UNIT) * BLOCK, count = from + tokens - b * BLOCK < BLOCK ? from + tokens - b * BLOCK : BLOCK;
      product(&t.weights[at], UNIT_TOKENS, queries, values(b, t.unit.inverse + at), s.latent ? nullptr : next(), (count + 1) / 2,
              value_dim / 16, [&](int query, int v, I32 sum) {
                float* out = &t.out[size_t(query) * value_dim + 16 * v];
                store(out, b > begin ? ::everwarm::EVERWARM_ISA::add(load(out), to_f32(sum)) : to_f32(sum));
              });
    }
    if (partials) {
      for (int i = 0; i < queries; i++) {
        float* p = partials + (size_t(i) * units + (unit - first)) * (value_dim + 2);
        p[0] = t.unit_m[i], p[1] = t.unit_l[i];
        std::memcpy(p + 2, &t.out[size_t(i) * value_dim], value_dim * 4);
      }
    } else {
      merge_all(t, queries, value_dim);
    }
  }
}

// A sink is a score of no token: it takes a share of the weights and gives nothing. It is merged last, as a unit of its own.
inline void write_out(float* o, float m, float l, const float* sink, int dim, float* out) {
  if (sink) {
    float factors[16] = {};
    const float sink_m = *sink * LOG2_E, new_m = m > sink_m ? m : sink_m;
    factors[0] = m - new_m, factors[1] = sink_m - new_m;
    store(factors, power_of_two(load(factors)));
    l = std::fma(l, factors[0], factors[1]);
    for (int d = 0; d < dim; d += 16) store(o + d, mul(load(o + d), splat(factors[0])));
  }
  const F32 inverse = splat(1.f / l);
  for (int d = 0; d < dim; d += 16) store(out + d, mul(load(o + d), inverse));
}

struct AttentionTask {
  int span, kv_head, row, rows, first, last;
  size_t partials;  // offset, for a task that covers only some of the units
  bool split;
};

void attention(Pool& pool, const KVShape& s, const float* q, int heads, const SpanRows* spans, int count, float scale, int window,
               float softcap, const float* sinks, float* out) {
  const int dim = s.value_dim, shared = heads / s.kv_heads;
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
  const auto sink_of = [&](const AttentionTask& t, int query) { return sinks ? sinks + t.kv_head * shared + query % shared : nullptr; };
  pool.run(int(tasks.size()), [&](int index, int) {
    static thread_local AttentionScratch scratch;
    const AttentionTask& t = tasks[index];
    const auto run = s.type == KVType::f16 ? attend<KVType::f16> : s.type == KVType::q8 ? attend<KVType::q8> : attend<KVType::q4>;
    run(s, q, heads, spans[t.span], t.kv_head, t.row, t.rows, t.first, t.last, scale, window, softcap, scratch,
        t.split ? &partials[t.partials] : nullptr);
    if (!t.split)
      for (int i = 0; i < t.rows * shared; i++)
        write_out(&scratch.o[size_t(i) * dim], scratch.m[i], scratch.l[i], sink_of(t, i), dim, out_at(t, i));
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
      for (size_t k = starts[index];
           k < tasks.size() && tasks[k].split && tasks[k].span == head.span && tasks[k].kv_head == head.kv_head && tasks[k].row == head.row;
           k++) {
        const int units = tasks[k].last - tasks[k].first;
        for (int u = 0; u < units; u++) {
          const float* p = &partials[tasks[k].partials + (size_t(i) * units + u) * (dim + 2)];
          if (p[0] > -INFINITY) merge(m, l, o.data(), p[0], p[1], p + 2, dim);
        }
      }
      write_out(o.data(), m, l, sink_of(head, i), dim, out_at(head, i));
    }
  });
}

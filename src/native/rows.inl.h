// Row by row: exponential, norm, quantisation, gating, rotation. Included once per instruction set, inside its namespace.

// e^x to about 1 ulp; exactly 0 below -87, exactly 1 at 0.
inline F32 exponential(F32 x) {
  const F32 clamped = min(max(x, splat(-87.f)), splat(88.f));
  const I32 n = round(mul(clamped, splat(1.44269504088896341f)));
  const F32 k = to_f32(n);
  F32 r = fma(k, splat(-0.693359375f), clamped);
  r = fma(k, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, splat(1.f)));
  return keep_if_at_least(scale_by_power(p, n), x, -87.f);
}

// 2^x for x <= 0, to about 1 ulp; exactly 0 below -126 (whatever the arithmetic makes of it), exactly 1 at 0.
inline F32 power_of_two(F32 x) {
  const I32 n = round(x);
  const F32 r = sub(x, to_f32(n));
  F32 p = splat(1.326472725e-3f);
  p = fma(p, r, splat(9.671512786e-3f));
  p = fma(p, r, splat(5.550733744e-2f));
  p = fma(p, r, splat(2.402224208e-1f));
  p = fma(p, r, splat(6.931469776e-1f));
  p = fma(p, r, splat(1.f));
  return keep_if_at_least(scale_by_power(p, n), x, -126.f);
}

// x * sigmoid(x), or x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2.
inline F32 activate(F32 x, Activation activation) {
  F32 t = x;
  if (activation == Activation::gelu) t = mul(x, fma(mul(x, x), splat(0.07135481282f), splat(1.595769122f)));
  return div(x, add(splat(1.f), exponential(sub(splat(0.f), t))));
}

// The sum of sixteen codes, exact; 0 where a NaN left something that is no code.
inline int32_t sum_of_codes(I32 codes) {
  const float sum = reduce_add(to_f32(codes));
  return sum >= -2048.f && sum <= 2048.f ? int32_t(sum) : 0;
}

// If one of 32 elements is far greater than all others: takes it out, and returns the greatest of the others.
inline float take_outlier(F32& a, F32& b, float greatest, float second, float* outlier, int32_t* outlier_at) {
  float x[GROUP];
  store(x, a), store(x + 16, b);
  int at = 0, count = 0;
  for (int i = GROUP - 1; i >= 0; i--)
    if (std::fabs(x[i]) == greatest) at = i, count++;
  if (count != 1) return greatest;
  *outlier = x[at], *outlier_at = at;
  x[at] = 0.f;
  a = load(x), b = load(x + 16);
  return second;
}

// One group of 32, as group `at` of all rows' groups.
inline void quantize_group(F32 a, F32 b, const QuantOut& q, size_t at) {
  float greatest = reduce_max(max(abs(a), abs(b)));
  const float second = reduce_max(max(zero_where_equal(abs(a), greatest), zero_where_equal(abs(b), greatest)));
  q.outlier_at[at] = -1;
  if (greatest > OUTLIER_RATIO * second) greatest = take_outlier(a, b, greatest, second, q.outlier + at, q.outlier_at + at);
  const F32 inverse = splat(greatest > 0.f ? 127.f / greatest : 0.f);
  const I32 first = round(mul(a, inverse)), last = round(mul(b, inverse));
  int8_t* codes = q.codes + at * GROUP;
  store_i8(codes, first), store_i8(codes + 16, last);
  const int32_t low = sum_of_codes(first), high = sum_of_codes(last);
  q.sums[2 * at] = low, q.sums[2 * at + 1] = high;
  q.scale[at] = greatest / 127.f;
  q.scaled_sum[at] = q.scale[at] * float(low + high);
  q.scaled_halves[2 * at] = q.scale[at] * float(low), q.scaled_halves[2 * at + 1] = q.scale[at] * float(high);
}

inline void quantize_row(const float* x, const QuantOut& q, int row) {
  const int groups = q.inputs / GROUP;
  for (int g = 0; g < groups; g++) quantize_group(load(x + g * GROUP), load(x + g * GROUP + 16), q, size_t(row) * groups + g);
}

inline int row_chunks(int rows, int per_chunk) { return (rows + per_chunk - 1) / per_chunk; }

void quantize(Pool& pool, const float* x, int rows, const QuantOut& q) {
  constexpr int STEP = 8;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) quantize_row(x + size_t(r) * q.inputs, q, r);
  });
}

// width may be any; the last, partial vector is added element by element.
inline float sum_of_squares(const float* x, int width) {
  F32 sum = splat(0.f);
  int i = 0;
  for (; i + 16 <= width; i += 16) {
    const F32 v = load(x + i);
    sum = fma(v, v, sum);
  }
  float total = reduce_add(sum);
  for (; i < width; i++) total = std::fma(x[i], x[i], total);
  return total;
}

void rms_norm(Pool& pool, const float* x, int rows, int width, const float* weight, float epsilon, float* y, const QuantOut* q) {
  constexpr int STEP = 8;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) {
      const float* in = x + size_t(r) * width;
      float* out = y + size_t(r) * width;
      const float factor = 1.f / std::sqrt(sum_of_squares(in, width) / float(width) + epsilon);
      int i = 0;
      for (; i + 16 <= width; i += 16) store(out + i, mul(mul(load(in + i), splat(factor)), load(weight + i)));
      for (; i < width; i++) out[i] = in[i] * factor * weight[i];
      if (q) quantize_row(out, *q, r);
    }
  });
}

void gate_floats(Pool& pool, float* gate, const float* up, size_t count, Activation activation) {
  constexpr size_t STEP = 4096;
  pool.run(int((count + STEP - 1) / STEP), [&](int chunk, int) {
    const size_t end = count < (chunk + 1) * STEP ? count : (chunk + 1) * STEP;
    size_t i = chunk * STEP;
    for (; i + 16 <= end; i += 16) store(gate + i, mul(activate(load(gate + i), activation), load(up + i)));
    if (i < end) {
      float g[16] = {}, u[16] = {};
      std::memcpy(g, gate + i, (end - i) * 4), std::memcpy(u, up + i, (end - i) * 4);
      store(g, mul(activate(load(g), activation), load(u)));
      std::memcpy(gate + i, g, (end - i) * 4);
    }
  });
}

void rotate(Pool& pool, float* x, int rows, int heads, int head_dim, const float* cosine, const float* sine, int pairs, bool adjacent) {
  constexpr int STEP = 8;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++)
      for (int h = 0; h < heads; h++) {
        float* head = x + (size_t(r) * heads + h) * head_dim;
        const float *c = cosine + size_t(r) * pairs, *s = sine + size_t(r) * pairs;
        for (int i = 0; i < pairs; i++) {
          float &a = head[adjacent ? 2 * i : i], &b = head[adjacent ? 2 * i + 1 : i + pairs];
          const float turned = a * c[i] - b * s[i];
          b = a * s[i] + b * c[i];
          a = turned;
        }
      }
  });
}

// A row of logits: where its maximum is (the first, if there are several), the maximum, and the sum of e^((x - maximum) / temperature).
// The sum is NaN if any element is NaN or +infinity.
Summary summarize(const float* x, int count, float inverse_temperature) {
  Summary s{0, -INFINITY, 0.f};
  F32 greatest = splat(-INFINITY), poison = splat(0.f);
  int i = 0;
  for (; i + 16 <= count; i += 16) {
    const F32 v = load(x + i);
    greatest = max(greatest, v), poison = fma(max(splat(-FLT_MAX), v), splat(0.f), poison);  // max keeps a NaN on its right
  }
  s.greatest = reduce_max(greatest);
  float bad = reduce_add(poison);
  for (int j = i; j < count; j++) {
    if (x[j] > s.greatest) s.greatest = x[j];
    if (!(x[j] <= FLT_MAX)) bad = NAN;
  }
  while (s.best < count - 1 && x[s.best] != s.greatest) s.best++;
  F32 sums[4] = {splat(0.f), splat(0.f), splat(0.f), splat(0.f)};
  const F32 m = splat(s.greatest), t = splat(inverse_temperature);
  const auto power = [&](const float* p) { return exponential(mul(sub(load(p), m), t)); };
  for (i = 0; i + 64 <= count; i += 64)
    for (int j = 0; j < 4; j++) sums[j] = add(sums[j], power(x + i + 16 * j));
  for (; i < count; i += 16) {
    float rest[16];
    for (int j = 0; j < 16; j++) rest[j] = i + j < count ? x[i + j] : -INFINITY;
    sums[0] = add(sums[0], power(rest));
  }
  s.total = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) + bad;
  return s;
}

// The first id at which the sum of e^((x - greatest) / temperature), over ids from 0 on, exceeds `target`; else the last that adds to it.
int draw(const float* x, int count, float inverse_temperature, float greatest, double target) {
  double sum = 0;
  int last = 0;
  for (int i = 0; i < count; i += 16) {
    float v[16];
    for (int j = 0; j < 16; j++) v[j] = i + j < count ? x[i + j] : -INFINITY;
    const F32 e = exponential(mul(sub(load(v), splat(greatest)), splat(inverse_temperature)));
    const float all = reduce_add(e);
    if (all > 0.f) last = i;
    if (sum + double(all) <= target) {
      sum += double(all);
      continue;
    }
    store(v, e);
    for (int j = 0; j < 16; j++)
      if ((sum += double(v[j])) > target) return i + j;
  }
  float v[16];
  for (int j = 0; j < 16; j++) v[j] = last + j < count ? x[last + j] : -INFINITY;
  store(v, exponential(mul(sub(load(v), splat(greatest)), splat(inverse_temperature))));
  for (int j = 15; j > 0; j--)
    if (v[j] > 0.f) return last + j;
  return last;
}

// Set x[i] to -infinity unless bit i % 32 of allowed[i / 32] is set. Returns how many are allowed.
int forbid(float* x, int count, const uint32_t* allowed) {
  int left = 0;
  for (int i = 0; i < count; i += 32) {
    const int width = count - i < 32 ? count - i : 32;
    const uint32_t inside = width == 32 ? ~0u : (1u << width) - 1, word = allowed[i / 32] & inside;
    if (word == inside) {
      left += width;
      continue;
    }
    if (!word) {  // the usual case: a grammar leaves few of many tokens
      for (int j = 0; j < width; j++) x[i + j] = -INFINITY;
      continue;
    }
    for (int j = 0; j < width; j++) {
      const bool set = word >> j & 1;
      left += set;
      if (!set) x[i + j] = -INFINITY;
    }
  }
  return left;
}

// Ids of the k greatest, greatest first, the smaller id first among equals. NaN is never among them. Returns how many there are.
int greatest_ids(const float* x, int count, int k, int32_t* ids) {
  const auto better = [x](int32_t a, int32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  int size = 0;  // ids[0, size) is a heap with the worst on top
  const auto offer = [&](int32_t id) {
    if (!(x[id] == x[id])) return;
    if (size < k) {
      ids[size++] = id;
      std::push_heap(ids, ids + size, better);
    } else if (better(id, ids[0])) {
      std::pop_heap(ids, ids + size, better);
      ids[size - 1] = id;
      std::push_heap(ids, ids + size, better);
    }
  };
  constexpr int STEP = 64;
  int i = 0;
  for (; i + STEP <= count; i += STEP) {
    const F32 most = max(max(load(x + i), load(x + i + 16)), max(load(x + i + 32), load(x + i + 48)));
    if (size == k && reduce_max(most) <= x[ids[0]]) continue;  // later ids lose against an equal value
    for (int j = 0; j < STEP; j++) offer(i + j);
  }
  for (; i < count; i++) offer(i);
  std::sort_heap(ids, ids + size, better);
  return size;
}

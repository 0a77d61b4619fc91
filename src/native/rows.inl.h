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

// What the next product gets of a gate and what stands beside it.
inline F32 gate_up(F32 gate, F32 up, Activation activation) {
  if (activation != Activation::clamped) return mul(activate(gate, activation), up);
  constexpr float LIMIT = 7.f, SLOPE = 1.702f;
  const F32 g = min(gate, splat(LIMIT)), u = max(min(up, splat(LIMIT)), splat(-LIMIT));
  const F32 turned = div(g, add(splat(1.f), exponential(mul(g, splat(-SLOPE)))));
  return mul(add(u, splat(1.f)), turned);
}

// What the next product gets where there is no gate.
inline F32 squared(F32 up) {
  const F32 positive = max(up, splat(0.f));
  return mul(positive, positive);
}

inline F32 gate_any(F32 gate, F32 up, Activation activation) {
  switch (activation) {
    case Activation::sigmoid: return div(up, add(splat(1.f), exponential(sub(splat(0.f), gate))));
    case Activation::product: return mul(gate, up);
    case Activation::positive: return mul(max(gate, splat(0.f)), max(up, splat(0.f)));
    default: return gate_up(gate, up, activation);
  }
}

inline F32 soft_cap(F32 s, float cap) {  // cap * tanh(s / cap)
  const F32 e = exponential(mul(s, splat(2.f / cap)));
  return mul(splat(cap), sub(splat(1.f), div(splat(2.f), ::everwarm::EVERWARM_ISA::add(e, splat(1.f)))));
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

// Row r has the weights number r % `weights`.
void rms_norm(Pool& pool, const float* x, int rows, int width, const float* weight, int weights, float epsilon, float* y,
              const QuantOut* q) {
  constexpr int STEP = 8;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) {
      const float* in = x + size_t(r) * width;
      float* out = y + size_t(r) * width;
      const float* w = weight + size_t(r % weights) * width;
      const float factor = 1.f / std::sqrt(sum_of_squares(in, width) / float(width) + epsilon);
      int i = 0;
      for (; i + 16 <= width; i += 16) store(out + i, mul(mul(load(in + i), splat(factor)), load(w + i)));
      for (; i < width; i++) out[i] = in[i] * factor * w[i];
      if (q) quantize_row(out, *q, r);
    }
  });
}

// whole(i) computes sixteen elements from i on, rest(i, n) the last n of them, which are fewer; on all threads.
template <class Whole, class Rest>
void sixteens(Pool& pool, size_t count, Whole&& whole, Rest&& rest) {
  constexpr size_t STEP = 4096;
  pool.run(int((count + STEP - 1) / STEP), [&](int chunk, int) {
    const size_t end = count < (chunk + 1) * STEP ? count : (chunk + 1) * STEP;
    size_t i = chunk * STEP;
    for (; i + 16 <= end; i += 16) whole(i);
    if (i < end) rest(i, end - i);
  });
}

void gate_floats(Pool& pool, float* gate, const float* up, size_t count, Activation activation) {
  sixteens(
      pool, count, [&](size_t i) { store(gate + i, gate_any(load(gate + i), load(up + i), activation)); },
      [&](size_t i, size_t n) {
        float g[16] = {}, u[16] = {};
        std::memcpy(g, gate + i, n * 4), std::memcpy(u, up + i, n * 4);
        store(g, gate_any(load(g), load(u), activation));
        std::memcpy(gate + i, g, n * 4);
      });
}

void add_scaled(Pool& pool, float* x, const float* y, size_t count, float scale) {
  sixteens(
      pool, count, [&](size_t i) { store(x + i, fma(load(y + i), splat(scale), load(x + i))); },
      [&](size_t i, size_t n) {
        for (size_t j = i; j < i + n; j++) x[j] = std::fma(y[j], scale, x[j]);
      });
}

// x * scale, then softcap * tanh(x / softcap) if that is not 0.
void scale_floats(Pool& pool, float* x, size_t count, float scale, float softcap) {
  const auto scaled = [&](const float* p) {
    const F32 v = mul(load(p), splat(scale));
    return softcap > 0.f ? soft_cap(v, softcap) : v;
  };
  sixteens(
      pool, count, [&](size_t i) { store(x + i, scaled(x + i)); },
      [&](size_t i, size_t n) {
        float v[16] = {};
        std::memcpy(v, x + i, n * 4);
        store(v, scaled(v));
        std::memcpy(x + i, v, n * 4);
      });
}

// The scores of one row, as what experts are chosen by (`by`) and what they count (`weight`).
struct RouteScratch {
  std::vector<float> weight, by, group;
};

// The place of the greatest; the first of several.
inline int greatest_at(const float* x, int count) {
  int best = 0;
  for (int i = 1; i < count; i++)
    if (x[i] > x[best]) best = i;
  return best;
}

// Only the best groups stay; what is in the others can't be chosen.
inline void keep_groups(const RouteShape& s, RouteScratch& t) {
  const int each = s.experts / s.groups;
  t.group.assign(s.groups, 0.f);
  for (int g = 0; g < s.groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int i = g * each; i < (g + 1) * each; i++) {
      const float x = t.by[i];
      if (x > first)
        second = first, first = x;
      else if (x > second)
        second = x;
    }
    t.group[g] = s.gating == Gating::sigmoid && each > 1 ? first + second : first;
  }
  std::vector<char> kept(s.groups, 0);
  for (int n = 0; n < s.groups_used; n++) {
    const int g = greatest_at(t.group.data(), s.groups);
    kept[g] = 1, t.group[g] = -INFINITY;
  }
  for (int i = 0; i < s.experts; i++)
    if (!kept[i / each]) t.by[i] = -INFINITY;
}

inline void route_row(const float* scores, const RouteShape& s, const float* selection_bias, int32_t* chosen, float* weights,
                      RouteScratch& t) {
  const int padded = (s.experts + 15) / 16 * 16;
  t.weight.assign(padded, -INFINITY);
  std::memcpy(t.weight.data(), scores, size_t(s.experts) * 4);
  if (s.gating == Gating::softmax) {
    float greatest = -INFINITY;
    for (int i = 0; i < s.experts; i++) greatest = scores[i] > greatest ? scores[i] : greatest;
    F32 sum = splat(0.f);
    for (int i = 0; i < padded; i += 16) {
      const F32 e = exponential(sub(load(&t.weight[i]), splat(greatest)));
      store(&t.weight[i], e), sum = add(sum, e);
    }
    const F32 total = splat(reduce_add(sum));
    for (int i = 0; i < padded; i += 16) store(&t.weight[i], div(load(&t.weight[i]), total));
  } else if (s.gating == Gating::sigmoid) {
    for (int i = 0; i < padded; i += 16)
      store(&t.weight[i], div(splat(1.f), add(splat(1.f), exponential(sub(splat(0.f), load(&t.weight[i]))))));
  }
  t.by.assign(t.weight.begin(), t.weight.begin() + s.experts);
  if (selection_bias)
    for (int i = 0; i < s.experts; i++) t.by[i] += selection_bias[i];
  if (s.groups > 1) keep_groups(s, t);
  for (int n = 0; n < s.used; n++) {
    int best = -1;  // NaN is never greater: then the first that is left is taken
    for (int i = 0; i < s.experts; i++) {
      bool taken = false;
      for (int m = 0; m < n; m++) taken |= chosen[m] == i;
      if (!taken && (best < 0 || t.by[i] > t.by[best])) best = i;
    }
    chosen[n] = best, weights[n] = t.weight[best];
  }
  if (s.gating == Gating::softmax_of_chosen) {
    float sum = 0.f;
    for (int n = s.used - 1; n >= 0; n--) {
      float e[16] = {weights[n] - weights[0]};
      store(e, exponential(load(e)));
      weights[n] = e[0], sum += e[0];
    }
    for (int n = 0; n < s.used; n++) weights[n] /= sum;
  } else if (s.normalised) {
    float sum = 0.f;
    for (int n = 0; n < s.used; n++) sum += weights[n];
    for (int n = 0; n < s.used; n++) weights[n] /= sum + 1e-20f;
  }
  for (int n = 0; n < s.used; n++) weights[n] *= s.scale;
}

void route(Pool& pool, const float* scores, int rows, const RouteShape& s, const float* selection_bias, int32_t* chosen, float* weights) {
  constexpr int STEP = 16;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    static thread_local RouteScratch scratch;
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++)
      route_row(scores + size_t(r) * s.experts, s, selection_bias, chosen + size_t(r) * s.used, weights + size_t(r) * s.used, scratch);
  });
}

// The weighted sum of what the experts of each row gave, the best first. `places` says where in `each` that is.
void combine(Pool& pool, const float* each, const int* places, const float* weights, int rows, int used, int width, float* out) {
  constexpr int STEP = 4;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) {
      const int* place = places + size_t(r) * used;
      const float* w = weights + size_t(r) * used;
      const auto from = [&](int n) { return each + size_t(place[n]) * width; };
      float* to = out + size_t(r) * width;
      int i = 0;
      for (; i + 16 <= width; i += 16) {
        F32 sum = mul(load(from(0) + i), splat(w[0]));
        for (int n = 1; n < used; n++) sum = fma(load(from(n) + i), splat(w[n]), sum);
        store(to + i, sum);
      }
      for (; i < width; i++) {
        float sum = from(0)[i] * w[0];
        for (int n = 1; n < used; n++) sum = std::fma(from(n)[i], w[n], sum);
        to[i] = sum;
      }
    }
  });
}

// Each row of x times the sigmoid of that row of h times a vector.
void weigh(Pool& pool, float* x, int width, const float* h, int inputs, const float* vector, int rows) {
  constexpr int STEP = 4;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) {
      const float* from = h + size_t(r) * inputs;
      F32 sum = splat(0.f);
      int i = 0;
      for (; i + 16 <= inputs; i += 16) sum = fma(load(from + i), load(vector + i), sum);
      float score = reduce_add(sum);
      for (; i < inputs; i++) score = std::fma(from[i], vector[i], score);
      float e[16] = {-score};
      store(e, exponential(load(e)));
      const float weight = 1.f / (1.f + e[0]);
      float* to = x + size_t(r) * width;
      for (int j = 0; j < width; j++) to[j] *= weight;
    }
  });
}

// In each head, what begins at `offset`.
void rotate(Pool& pool, float* x, int rows, int heads, int head_dim, int offset, const float* cosine, const float* sine, int pairs,
            bool adjacent) {
  constexpr int STEP = 8;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++)
      for (int h = 0; h < heads; h++) {
        float* head = x + (size_t(r) * heads + h) * head_dim + offset;
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

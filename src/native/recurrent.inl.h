// Layers with a state: a short convolution over time, gated DeltaNet, Mamba 2. Included once per instruction set, inside its namespace.
//
// A state goes from row to row of a sequence, one row after the other, in prefill as in decode: what it is after a token depends on the
// tokens alone. Threads share what is independent: channels of a convolution; heads, and tiles of columns of each, of a state. A tile is
// (rows of the state, TILE columns), 16 KiB for 128 rows: it stays in the first-level cache while all rows of a step pass.

constexpr int TILE = STATE_TILE;

// y[c] = sum over taps of weight[c][t] * x of `taps - 1 - t` rows before, channel by channel; then a bias and SiLU, if wanted. The state is
// the last `taps - 1` rows that came in.
void short_conv(Pool& pool, const float* x, int channels, int taps, const float* weight, const float* bias, bool silu,
                const StateRows* spans, int count, float* out) {
  constexpr int CHUNK = 256;
  const int chunks = (channels + CHUNK - 1) / CHUNK, before = taps - 1;
  std::vector<float> turned(size_t(taps) * channels);  // (taps, channels)
  for (int c = 0; c < channels; c++)
    for (int t = 0; t < taps; t++) turned[size_t(t) * channels + c] = weight[size_t(c) * taps + t];
  pool.run(count * chunks, [&](int task, int) {
    const StateRows& span = spans[task / chunks];
    const int begin = task % chunks * CHUNK, end = begin + CHUNK < channels ? begin + CHUNK : channels;
    // The row that lies `back` rows before row r of this span.
    const auto row = [&](int r) { return r >= 0 ? x + size_t(span.first + r) * channels : span.state + size_t(r + before) * channels; };
    const auto one = [&](int r, int c, int lanes) {
      float in[16] = {}, factor[16] = {};
      const auto get = [&](const float* from) {
        if (lanes == 16) return load(from);
        std::memcpy(in, from, lanes * 4);
        return load(in);
      };
      const auto weights = [&](const float* from) {
        if (lanes == 16) return load(from);
        std::memcpy(factor, from, lanes * 4);
        return load(factor);
      };
      F32 sum = bias ? weights(bias + c) : splat(0.f);
      for (int t = 0; t < taps; t++) sum = fma(get(row(r - before + t) + c), weights(&turned[size_t(t) * channels + c]), sum);
      if (silu) sum = activate(sum, Activation::silu);
      float* to = out + size_t(span.first + r) * channels + c;
      if (lanes == 16) {
        store(to, sum);
      } else {
        store(in, sum);
        std::memcpy(to, in, lanes * 4);
      }
    };
    for (int r = 0; r < span.count; r++)
      for (int c = begin; c < end; c += 16) one(r, c, end - c < 16 ? end - c : 16);
    for (int t = 0; t < before; t++) {  // forwards: what is read lies at or behind what is written
      const float* from = row(span.count - before + t);
      float* to = span.state + size_t(t) * channels;
      if (from != to) std::memmove(to + begin, from + begin, size_t(end - begin) * 4);
    }
  });
}

// log(1 + e^x), to about 1 ulp: with e = e^-|x| and s = e / (2 + e), log(1 + e) is 2 (s + s^3 / 3 + s^5 / 5 + ...), and s is a third at
// most.
inline F32 softplus(F32 x) {
  const F32 e = exponential(sub(splat(0.f), abs(x))), s = div(e, add(splat(2.f), e)), square = mul(s, s);
  F32 p = splat(1.f / 13.f);
  for (const float next : {1.f / 11.f, 1.f / 9.f, 1.f / 7.f, 1.f / 5.f, 1.f / 3.f, 1.f}) p = fma(p, square, splat(next));
  return add(max(x, splat(0.f)), mul(mul(splat(2.f), s), p));
}

// Of every row and head: decay = e^(a * softplus(x + bias)), and sigmoid(y) or, without one, softplus(x + bias) itself.
void decays(Pool& pool, const float* x, const float* y, int rows, int heads, const HeadPlaces& places, const float* a, const float* bias,
            float* decay, float* other) {
  constexpr int STEP = 16;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++)
      for (int first = 0; first < heads; first += 16) {
        const int lanes = heads - first < 16 ? heads - first : 16;
        float in[16] = {}, gate[16] = {}, factor[16] = {}, d[16], o[16];
        for (int i = 0; i < lanes; i++) {
          in[i] = x[size_t(r) * places.stride + places.of(first + i, true)] + bias[first + i];
          if (y) gate[i] = y[size_t(r) * places.stride + places.of(first + i, false)];
          factor[i] = a[first + i];
        }
        const F32 plus = softplus(load(in));
        store(d, exponential(mul(plus, load(factor))));
        store(o, y ? div(splat(1.f), add(splat(1.f), exponential(sub(splat(0.f), load(gate))))) : plus);
        std::memcpy(decay + size_t(r) * heads + first, d, lanes * 4);
        std::memcpy(other + size_t(r) * heads + first, o, lanes * 4);
      }
  });
}

// Each head of `width` elements, of the first `heads` of a row, gets the length `length`.
void lengths(Pool& pool, float* x, int rows, size_t stride, int heads, int width, float length, float epsilon) {
  constexpr int STEP = 4;
  pool.run(row_chunks(rows, STEP), [&](int chunk, int) {
    for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++)
      for (int h = 0; h < heads; h++) {
        float* p = x + size_t(r) * stride + size_t(h) * width;
        const float factor = length / std::sqrt(sum_of_squares(p, width) + epsilon);
        for (int i = 0; i < width; i += 16) store(p + i, mul(load(p + i), splat(factor)));
      }
  });
}

// A tile of sums over the rows of a state, in four parts each, so that additions need not wait for each other; always in this order.
struct TileSum {
  F32 part[4][TILE / 16];
  TileSum() {
    for (auto& each : part)
      for (F32& v : each) v = splat(0.f);
  }
  F32 total(int v) const { return add(add(part[0][v], part[1][v]), add(part[2][v], part[3][v])); }
};

// Gated DeltaNet: S *= decay; S += k (beta (v - S^T k))^T; out = S^T q. `qkv`: queries and keys of every key head, then values.
void delta_net(Pool& pool, const DeltaShape& s, const float* qkv, const float* decay, const float* beta, const StateRows* spans, int count,
               float* out) {
  const int tiles = s.value_dim / TILE, per_span = s.value_heads * tiles, shared = s.value_heads / s.key_heads;
  const size_t width = size_t(2) * s.key_heads * s.key_dim + size_t(s.value_heads) * s.value_dim;
  constexpr int VECTORS = TILE / 16;
  pool.run(count * per_span, [&](int task, int) {
    const StateRows& span = spans[task / per_span];
    const int head = task % per_span / tiles, tile = task % tiles, key_head = s.interleaved ? head % s.key_heads : head / shared;
    float* state = span.state + (size_t(head) * tiles + tile) * s.key_dim * TILE;
    for (int r = 0; r < span.count; r++) {
      const size_t row = span.first + r;
      const float *q = qkv + row * width + size_t(key_head) * s.key_dim, *k = q + size_t(s.key_heads) * s.key_dim;
      const float* value = qkv + row * width + size_t(2) * s.key_heads * s.key_dim + size_t(head) * s.value_dim + tile * TILE;
      const F32 g = splat(decay[row * s.value_heads + head]), b = splat(beta[row * s.value_heads + head]);
      TileSum seen, given;
      for (int i = 0; i < s.key_dim; i += 4)
        for (int j = 0; j < 4; j++) {
          const F32 at = splat(k[i + j]);
          for (int v = 0; v < VECTORS; v++) seen.part[j][v] = fma(load(state + (i + j) * TILE + 16 * v), at, seen.part[j][v]);
        }
      F32 delta[VECTORS];
      for (int v = 0; v < VECTORS; v++) delta[v] = mul(b, sub(load(value + 16 * v), mul(g, seen.total(v))));
      for (int i = 0; i < s.key_dim; i += 4)
        for (int j = 0; j < 4; j++) {
          const F32 at = splat(k[i + j]), asked = splat(q[i + j]);
          for (int v = 0; v < VECTORS; v++) {
            float* p = state + (i + j) * TILE + 16 * v;
            const F32 now = fma(at, delta[v], mul(g, load(p)));
            store(p, now);
            given.part[j][v] = fma(now, asked, given.part[j][v]);
          }
        }
      for (int v = 0; v < VECTORS; v++) store(out + (row * s.value_heads + head) * s.value_dim + tile * TILE + 16 * v, given.total(v));
    }
  });
}

// Mamba 2: S = decay S + B (dt x)^T; out = S^T C + d x. `xbc`: x of every head, then B and C of every group.
void mamba(Pool& pool, const MambaShape& s, const float* xbc, const float* decay, const float* dt, const float* d, const StateRows* spans,
           int count, float* out) {
  const int tiles = s.head_dim / TILE, per_span = s.heads * tiles, shared = s.heads / s.groups;
  const size_t inner = size_t(s.heads) * s.head_dim, width = inner + size_t(2) * s.groups * s.state;
  constexpr int VECTORS = TILE / 16;
  pool.run(count * per_span, [&](int task, int) {
    const StateRows& span = spans[task / per_span];
    const int head = task % per_span / tiles, tile = task % tiles;
    float* state = span.state + (size_t(head) * tiles + tile) * s.state * TILE;
    for (int r = 0; r < span.count; r++) {
      const size_t row = span.first + r;
      const float* x = xbc + row * width + size_t(head) * s.head_dim + tile * TILE;
      const float *b = xbc + row * width + inner + size_t(head / shared) * s.state, *c = b + size_t(s.groups) * s.state;
      const F32 g = splat(decay[row * s.heads + head]), step = splat(dt[row * s.heads + head]), skip = splat(d[head]);
      F32 in[VECTORS];
      for (int v = 0; v < VECTORS; v++) in[v] = mul(step, load(x + 16 * v));
      TileSum given;
      for (int i = 0; i < s.state; i += 4)
        for (int j = 0; j < 4; j++) {
          const F32 at = splat(b[i + j]), asked = splat(c[i + j]);
          for (int v = 0; v < VECTORS; v++) {
            float* p = state + (i + j) * TILE + 16 * v;
            const F32 now = fma(at, in[v], mul(g, load(p)));
            store(p, now);
            given.part[j][v] = fma(now, asked, given.part[j][v]);
          }
        }
      for (int v = 0; v < VECTORS; v++)
        store(out + row * inner + size_t(head) * s.head_dim + tile * TILE + 16 * v, fma(skip, load(x + 16 * v), given.total(v)));
    }
  });
}

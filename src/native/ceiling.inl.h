// What this machine could do at best: bytes read and integer products per second. Included once per instruction set.

// Integer multiply-adds per second, counted as two operations each, on all threads of the pool.
double integer_peak(Pool& pool) {
  constexpr int ROUNDS = 10000000, CHAINS = 8;
  pool.run(pool.threads() * 64, [](int, int) {});  // wake everyone
  const auto begin = std::chrono::steady_clock::now();
  std::vector<I32> kept(pool.threads() * 4);
  pool.run(pool.threads(), [&](int index, int) {
    alignas(64) uint8_t bytes[64];
    for (int i = 0; i < 64; i++) bytes[i] = uint8_t(i + index);
    const Bytes codes = load_bytes(bytes);
    int8_t quad[4] = {1, -2, 3, -4};
    const Bytes x = splat_quad(quad);
    // Different beginnings, or the compiler would find that all chains are one.
    I32 a = isplat(1), b = isplat(2), c = isplat(3), d = isplat(4), e = isplat(5), f = isplat(6), g = isplat(7), h = isplat(8);
    for (int i = 0; i < ROUNDS; i++) {
      a = dot(a, codes, x), b = dot(b, codes, x), c = dot(c, codes, x), d = dot(d, codes, x);
      e = dot(e, codes, x), f = dot(f, codes, x), g = dot(g, codes, x), h = dot(h, codes, x);
    }
    kept[index] = iadd(iadd(iadd(a, b), iadd(c, d)), iadd(iadd(e, f), iadd(g, h)));
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  volatile float sink = reduce_add(to_f32(kept[0]));
  (void)sink;
  return 2.0 * 64 * CHAINS * ROUNDS * pool.threads() / took.count();
}

// Bytes per second when all threads read memory that no cache holds.
double read_bandwidth(Pool& pool, const uint8_t* memory, size_t size) {
  const int pieces = pool.threads() * 16;
  const size_t piece = size / pieces / 256 * 256;
  std::vector<I32> kept(pieces);
  const int8_t ones[4] = {1, 1, 1, 1};
  const auto begin = std::chrono::steady_clock::now();
  pool.run(pieces, [&](int index, int) {
    const uint8_t* from = memory + index * piece;
    const Bytes one = splat_quad(ones);
    I32 a = isplat(0), b = a, c = a, d = a;
    for (size_t i = 0; i < piece; i += 256) {
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(from + i + line + AHEAD);
      a = dot(a, load_bytes(from + i), one), b = dot(b, load_bytes(from + i + 64), one);
      c = dot(c, load_bytes(from + i + 128), one), d = dot(d, load_bytes(from + i + 192), one);
    }
    kept[index] = iadd(iadd(a, b), iadd(c, d));
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  volatile float sink = reduce_add(to_f32(kept[0]));
  (void)sink;
  return double(piece) * pieces / took.count();
}

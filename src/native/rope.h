// Sine, cosine and logarithm for rotary tables, our own: the same bits on every machine, whatever its C library.
#pragma once
#include <cmath>

namespace everwarm {

// In f64, without contraction; angle is an f32 product of position and frequency. Good to better than 1e-15.
inline void sine_cosine(double angle, double& sine, double& cosine) {
  // angle - k * pi / 2, with pi / 2 in two parts: the first has 33 bits, so its product with k (at most 20 bits) is exact.
  const double k = std::nearbyint(angle * 0.63661977236758134308);
  const double r = (angle - k * 1.57079632673412561417e+00) - k * 6.07710050650619224932e-11;
  const double z = r * r;
  // Taylor series up to r^17 and r^16: |r| <= pi / 4, so what is left out is below 1e-17.
  double s = 1.0 / 355687428096000.0;
  s = s * z - 1.0 / 1307674368000.0;
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = r + r * z * s;
  double c = 1.0 / 20922789888000.0;
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = 1.0 + z * c;
  switch (static_cast<long long>(k) & 3) {
    case 0: sine = s, cosine = c; break;
    case 1: sine = c, cosine = -s; break;
    case 2: sine = -s, cosine = -c; break;
    default: sine = -c, cosine = s; break;
  }
}

// Of a finite number above 0, in f64, without contraction. Good to better than 1e-15.
inline double natural_logarithm(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);  // in [0.5, 1)
  if (m < 0.70710678118654752440) m *= 2.0, exponent--;
  // log m = 2 artanh(s), and |s| < 0.172: what the series leaves out is below 1e-17.
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  double sum = 0.0;
  for (int k = 21; k >= 1; k -= 2) sum = sum * z + 1.0 / k;
  return double(exponent) * 0.69314718055994530942 + 2.0 * s * sum;
}

}  // namespace everwarm

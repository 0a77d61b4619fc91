// All kernels, compiled for one instruction set.
#include <algorithm>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "kernels.h"
#include "simd_avx512.h"

#define EVERWARM_ISA avx512

namespace everwarm::avx512 {
namespace {

#include "rows.inl.h"

#include "matmul.inl.h"

#include "attention.inl.h"

#include "ceiling.inl.h"

}  // namespace
}  // namespace everwarm::avx512

namespace everwarm {

const Kernels& avx512_kernels() {
  using namespace avx512;
  static const Kernels kernels{"avx512", rms_norm, quantize, products, gated, gate_floats, rotate, store_kv, attention, summarize, draw, greatest_ids, integer_peak, read_bandwidth};
  return kernels;
}

}  // namespace everwarm

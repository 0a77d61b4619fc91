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
#include "simd_avx2.h"

#define EVERWARM_ISA avx2

namespace everwarm::avx2 {
namespace {

#include "rows.inl.h"

#include "matmul.inl.h"

#include "attention.inl.h"

#include "ceiling.inl.h"

}  // namespace
}  // namespace everwarm::avx2

namespace everwarm {

const Kernels& avx2_kernels() {
  using namespace avx2;
  static const Kernels kernels{"avx2", rms_norm, quantize, products, gated, gate_floats, rotate, store_kv, attention, summarize, draw, greatest_ids, integer_peak, read_bandwidth};
  return kernels;
}

}  // namespace everwarm

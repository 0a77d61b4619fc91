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
#include "simd_portable.h"

#define EVERWARM_ISA portable

namespace everwarm::portable {
namespace {

#include "rows.inl.h"

#include "matmul.inl.h"

#include "attention.inl.h"

#include "ceiling.inl.h"

}  // namespace
}  // namespace everwarm::portable

namespace everwarm {

const Kernels& portable_kernels() {
  using namespace portable;
  static const Kernels kernels{"portable", rms_norm, quantize, products, gated, gate_floats, rotate, store_kv, attention, summarize, draw, greatest_ids, integer_peak, read_bandwidth};
  return kernels;
}

}  // namespace everwarm

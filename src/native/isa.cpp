// All kernels for one instruction set. CMake compiles this file once per set, with EVERWARM_ISA as its name: avx512, avx2, portable.
#include <algorithm>
#include <cfloat>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "grids.h"
#include "kernels.h"

#define EVERWARM_TEXT(x) #x
#define EVERWARM_SIMD_HEADER(isa) EVERWARM_TEXT(simd_##isa.h)
#define EVERWARM_NAME(isa) EVERWARM_TEXT(isa)
#define EVERWARM_TABLE(isa) isa##_kernels
// One more expansion, so that what is pasted or quoted is the name of the set and not the word EVERWARM_ISA.
#define EVERWARM_EXPAND(macro, isa) macro(isa)

#include EVERWARM_EXPAND(EVERWARM_SIMD_HEADER, EVERWARM_ISA)

namespace everwarm::EVERWARM_ISA {
namespace {

#include "rows.inl.h"

#include "low_bit.inl.h"

#include "matmul.inl.h"

#include "attention.inl.h"

#include "recurrent.inl.h"

#include "ceiling.inl.h"

}  // namespace
}  // namespace everwarm::EVERWARM_ISA

namespace everwarm {

const Kernels& EVERWARM_EXPAND(EVERWARM_TABLE, EVERWARM_ISA)() {
  using namespace EVERWARM_ISA;
#define EVERWARM_KERNEL(result, name, arguments) , name
  static const Kernels kernels{EVERWARM_EXPAND(EVERWARM_NAME, EVERWARM_ISA) EVERWARM_KERNELS(EVERWARM_KERNEL)};
#undef EVERWARM_KERNEL
  return kernels;
}

}  // namespace everwarm

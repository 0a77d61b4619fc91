// The Python face of the native core. Arguments are checked here, before any kernel sees them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "everwarm's native core";
  nb::class_<everwarm::Cpu>(m, "Cpu")
      .def_ro("model", &everwarm::Cpu::model)
      .def_ro("features", &everwarm::Cpu::features);
  m.def("detect_cpu", &everwarm::detect_cpu, "What this processor can do.");
}

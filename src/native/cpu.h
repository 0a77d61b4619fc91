// What this processor can do, asked of the processor itself at run time.
#pragma once
#include <string>
#include <vector>

namespace everwarm {

struct Cpu {
  std::string model;                  // marketing name, or the architecture where there is none
  std::vector<std::string> features;  // those that a kernel may choose by, e.g. "avx2", "fma", "avx512vnni"
};

Cpu detect_cpu();

// Instruction sets that there are kernels for and that this processor has, best first.
std::vector<std::string> supported_isas();

}  // namespace everwarm

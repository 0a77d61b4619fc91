#include "cpu.h"

#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

namespace everwarm {

#if defined(__x86_64__) || defined(__i386__)

static std::string brand() {
  unsigned words[12];
  unsigned a, b, c, d;
  if (!__get_cpuid(0x80000000u, &a, &b, &c, &d) || a < 0x80000004u) return "x86";
  for (unsigned i = 0; i < 3; i++) __get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2], &words[4 * i + 3]);
  char text[49];
  std::memcpy(text, words, 48);
  text[48] = 0;
  std::string name(text);
  const size_t first = name.find_first_not_of(' '), last = name.find_last_not_of(' ');
  return first == std::string::npos ? "x86" : name.substr(first, last - first + 1);
}

Cpu detect_cpu() {
  __builtin_cpu_init();
  Cpu cpu{brand(), {}};
  // __builtin_cpu_supports also asks the operating system (xgetbv), which cpuid alone does not.
#define ASK(name) \
  if (__builtin_cpu_supports(name)) cpu.features.push_back(name)
  ASK("sse4.2");
  ASK("avx");
  ASK("avx2");
  ASK("fma");
  ASK("avx512f");
  ASK("avx512bw");
  ASK("avx512vl");
  ASK("avx512vnni");
#undef ASK
  return cpu;
}

#else

Cpu detect_cpu() {
#if defined(__aarch64__)
  return {"aarch64", {"neon"}};
#else
  return {"unknown", {}};
#endif
}

#endif

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
  if (avx2 && avx512) names.push_back("avx512");
  if (avx2) names.push_back("avx2");
#endif
  names.push_back("portable");
  return names;
}

}  // namespace everwarm

// The tensor types of GGUF that have a form, each declared once. A tensor of another type is dequantised and kept as F32.
//
// To add a type whose codes and scales are in forms.h, add a row here and a struct of its name to blocks.h, which reads its blocks. The
// kernels, the packing and Python (`_native.TENSOR_TYPES`) follow. New kinds of codes or scales are added to forms.h and to the kernels.
#pragma once

// clang-format off

// TYPE(name in GGUF, codes and scales in forms.h, the code that stands for zero, inputs of a block, bytes of a block)
#define EVERWARM_QUANTISED_TYPES(TYPE)             \
  TYPE(Q4_0, nibbles, half,        8,  32,  18)    \
  TYPE(Q4_1, nibbles, half_min,    0,  32,  20)    \
  TYPE(Q5_0, five,    half,       16,  32,  22)    \
  TYPE(Q5_1, five,    half_min,    0,  32,  24)    \
  TYPE(Q8_0, bytes,   half,      128,  32,  34)    \
  TYPE(Q4_K, nibbles, super_min,   0, 256, 144)    \
  TYPE(Q5_K, five,    super_min,   0, 256, 176)    \
  TYPE(Q6_K, six,     super,      32, 256, 210)

// TYPE(name in GGUF, name in forms.h, bytes of an element)
#define EVERWARM_FLOAT_TYPES(TYPE) \
  TYPE(F32,  f32,  4)              \
  TYPE(F16,  f16,  2)              \
  TYPE(BF16, bf16, 2)

// clang-format on

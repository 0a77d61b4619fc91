// The tensor types of GGUF that have a form, each declared once. A tensor of another type is dequantised and kept as F32.
//
// To add a type whose codes and scales are in forms.h, add a row here and a struct of its name to blocks.h, which reads its blocks. The
// kernels, the packing and Python (`_native.TENSOR_TYPES`) follow. New kinds of codes or scales are added to forms.h and to the kernels.
#pragma once

// clang-format off

// TYPE(name in GGUF, codes and scales in forms.h, the code that stands for zero, inputs of a block, bytes of a block)
#define EVERWARM_QUANTISED_TYPES(TYPE)                \
  TYPE(Q4_0,    nibbles, half,         8,  32,  18)   \
  TYPE(Q4_1,    nibbles, half_min,     0,  32,  20)   \
  TYPE(Q5_0,    five,    half,        16,  32,  22)   \
  TYPE(Q5_1,    five,    half_min,     0,  32,  24)   \
  TYPE(Q8_0,    bytes,   half,       128,  32,  34)   \
  TYPE(Q4_K,    nibbles, super_min,    0, 256, 144)   \
  TYPE(Q5_K,    five,    super_min,    0, 256, 176)   \
  TYPE(Q6_K,    six,     super,       32, 256, 210)   \
  TYPE(IQ4_NL,  iq4,     half,       128,  32,  18)   \
  TYPE(IQ4_XS,  iq4,     super_32,   128, 256, 136)   \
  TYPE(MXFP4,   fp4,     power,       12,  32,  17)   \
  TYPE(NVFP4,   fp4,     float8,      12,  64,  36)   \
  TYPE(Q2_K,    two,     fours_min,    0, 256,  84)   \
  TYPE(Q3_K,    three,   super_six,    4, 256, 110)   \
  TYPE(IQ2_XXS, iq2_xxs, odd,         64, 256,  66)   \
  TYPE(IQ3_S,   iq3_s,   odd,         64, 256, 110)   \
  TYPE(IQ1_S,   iq1,     odd,         16, 256,  50)   \
  TYPE(IQ1_M,   iq1,     odd_16,      16, 256,  56)   \
  TYPE(IQ2_XS,  iq2_xs,  odd_16,      64, 256,  74)   \
  TYPE(IQ2_S,   iq2_s,   odd_16,      64, 256,  82)   \
  TYPE(IQ3_XXS, iq3_xxs, odd,         64, 256,  98)   \
  TYPE(TQ1_0,   trits,   only_super,   1, 256,  54)   \
  TYPE(TQ2_0,   two,     only_super,   1, 256,  66)

// TYPE(name in GGUF, name in forms.h, bytes of an element)
#define EVERWARM_FLOAT_TYPES(TYPE) \
  TYPE(F32,  f32,  4)              \
  TYPE(F16,  f16,  2)              \
  TYPE(BF16, bf16, 2)

// clang-format on

// GGUF blocks to forms, and forms back to floats. Codes and scales are moved, never rounded.
#pragma once
#include <cstdint>
#include <vector>

#include "forms.h"
#include "threads.h"

namespace everwarm {

struct BlockCodes;
struct BlockScales;

// A row of types.h. A form of a quantised type is a copy of `quantised` with a shape and memory; of a float type, a copy of `floats`.
struct TensorType {
  const char* name;
  int block_inputs, block_bytes;  // a float type has blocks of one input
  Weight quantised;
  FloatWeight floats;
  void (*read_codes)(const uint8_t* block, BlockCodes& codes);  // null in a float type
  void (*read_scales)(const uint8_t* block, BlockScales& scales);

  bool is_quantised() const { return read_codes != nullptr; }
  size_t row_bytes(int inputs) const { return size_t(inputs) / block_inputs * block_bytes; }  // in a file
};

const std::vector<TensorType>& tensor_types();

// Fill a form from the blocks of a GGUF tensor: (outputs, inputs / block) blocks, row by row.
void pack(const TensorType& type, const uint8_t* from, const Weight& form, uint8_t* out, Pool& pool);

// Rows of a form as floats: bit for bit what dequantising the file gives. rows may repeat and be in any order.
void dequantize_rows(const Weight& form, const int32_t* rows, int count, float* out, Pool& pool);

void pack_floats(const uint8_t* rows, const FloatWeight& form, uint8_t* out, Pool& pool);
void dequantize_float_rows(const FloatWeight& form, const int32_t* rows, int count, float* out, Pool& pool);

}  // namespace everwarm

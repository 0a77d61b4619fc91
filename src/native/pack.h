// GGUF blocks to forms, and forms back to floats. Codes and scales are moved, never rounded.
#pragma once
#include <cstdint>
#include <string>

#include "forms.h"
#include "threads.h"

namespace everwarm {

// The form that holds tensors of this GGUF type; false if there is none.
bool form_of(const std::string& type, int outputs, int inputs, Weight& form);

// Bytes of one row of a GGUF tensor of a type that has a form.
size_t block_row_bytes(const std::string& type, int inputs);

// Fill a form from the blocks of a GGUF tensor: (outputs, inputs / block) blocks, row by row.
void pack(const std::string& type, const uint8_t* blocks, const Weight& form, uint8_t* out, Pool& pool);

// Rows of a form as floats: bit for bit what dequantising the file gives. rows may repeat and be in any order.
void dequantize_rows(const Weight& form, const int32_t* rows, int count, float* out, Pool& pool);

void pack_floats(Floats type, const uint8_t* rows, const FloatWeight& form, uint8_t* out, Pool& pool);
void dequantize_float_rows(const FloatWeight& form, const int32_t* rows, int count, float* out, Pool& pool);

}  // namespace everwarm

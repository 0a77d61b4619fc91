// The kernels of one instruction set, behind one table. Every table computes the same bits.
#pragma once
#include <cstdint>

#include "forms.h"
#include "threads.h"

namespace everwarm {

// Where quantised activations are written; `QuantRows` reads them.
struct QuantOut {
  int inputs;
  int8_t* codes;
  float *scale, *scaled_sum, *scaled_halves;
  int32_t* sums;
  float* outlier;
  int32_t* outlier_at;
};

// One product of several that share their activations: y = x W^T + bias, or y += x W^T.
struct Product {
  const Weight* quantised;    // one of the two
  const FloatWeight* floats;
  const float* bias;          // may be null
  float* y;
  size_t stride;              // between rows of y
  bool add;
};

// Rows [first, first + rows) of the activations, and the product that is theirs; `product.y` is where its first row goes.
struct RowGroup {
  int first, rows;
  Product product;
};

// The same for a gate and what stands beside it. Biases may be null, and so may the gates of all groups: then what is positive is squared.
struct GateGroup {
  int first, rows;
  const Weight *gate, *up;
  const float *gate_bias, *up_bias;
};

enum class KVType : int { f16, q8, q4 };

// One layer's keys and values of a block of tokens, for all KV heads: see attention.inl.h. Where values are the beginnings of keys (a
// latent, from which a model makes both), they are stored once.
struct KVShape {
  KVType type;
  int kv_heads, key_dim, value_dim;
  bool latent;
};

// Consecutive rows of one sequence in a batch: rows [first, first + count) are at positions start, start + 1, ...
struct SpanRows {
  int first, count, start;
  uint8_t* const* blocks;  // one pointer per block of the sequence, to this layer's part of it
};

// What sampling asks of a row of logits.
struct Summary {
  int best;
  float greatest, total;
};

// gelu: by tanh, as models are trained with. clamped: gate and up are cut off at 7, and up counts one more. The others are computed from
// floats only (`gate_floats`): sigmoid of the gate times up, gate times up, and the product of what is positive of both.
enum class Activation { silu, gelu, clamped, sigmoid, product, positive };

// Rows of one sequence in a step, and its state in one layer.
struct StateRows {
  int first, count;
  float* state;
};
constexpr int STATE_TILE = 32;  // columns of a state that lie together

// Gated DeltaNet: states of (key_dim, value_dim) for each value head. Key head of value head h: h % key_heads if they are interleaved, else
// h / (value_heads / key_heads).
struct DeltaShape {
  int key_heads, value_heads, key_dim, value_dim;
  bool interleaved;
};

// Mamba 2: states of (state, head_dim) for each head.
struct MambaShape {
  int heads, groups, head_dim, state;
};

// Where two numbers of a head are in a row. Either each kind lies by itself, or (`group` > 0) they alternate: `group` of the one kind, then
// as many of the other.
struct HeadPlaces {
  size_t stride;
  int group;
  int of(int head, bool second) const { return group ? head / group * 2 * group + head % group + (second ? group : 0) : head; }
};

// How a router's scores become the experts of a row.
enum class Gating : int { softmax, sigmoid, softmax_of_chosen };
struct RouteShape {
  int experts, used;
  Gating gating;
  bool normalised;
  float scale;
  int groups, groups_used;
};

// The kernels, each declared once: what it returns, its name, what it takes. Each instruction set defines all of them in the .inl.h files.
// clang-format off
#define EVERWARM_KERNELS(KERNEL)                                                                                                      \
  KERNEL(void, rms_norm, (Pool&, const float* x, int rows, int width, const float* weight, int weights, float epsilon, float* y,        \
                          const QuantOut* q))                                                                                         \
  KERNEL(void, quantize, (Pool&, const float* x, int rows, const QuantOut& q))                                                        \
  KERNEL(void, products, (Pool&, const QuantRows* q, const float* x, int rows, int inputs, const Product* products, int count))      \
  KERNEL(void, gated, (Pool&, const QuantRows& x, const Weight& gate, const Weight& up, Activation activation, const QuantOut& out))   \
  KERNEL(void, gate_floats, (Pool&, float* gate, const float* up, size_t count, Activation activation))                               \
  KERNEL(void, add_scaled, (Pool&, float* x, const float* y, size_t count, float scale))                                              \
  KERNEL(void, scale_floats, (Pool&, float* x, size_t count, float scale, float softcap))                                             \
  KERNEL(void, route, (Pool&, const float* scores, int rows, const RouteShape&, const float* selection_bias, int32_t* chosen,          \
                       float* weights))                                                                                               \
  KERNEL(void, combine, (Pool&, const float* each, const int* places, const float* weights, int rows, int used, int width, float* out)) \
  KERNEL(void, weigh, (Pool&, float* x, int width, const float* h, int inputs, const float* vector, int rows))                        \
  KERNEL(void, rotate, (Pool&, float* x, int rows, int heads, int head_dim, int offset, const float* cosine, const float* sine,        \
                        int pairs, bool adjacent))                                                                                    \
  KERNEL(void, grouped_products, (Pool&, const QuantRows* q, const float* x, int inputs, const RowGroup* groups, int count))           \
  KERNEL(void, grouped_gated, (Pool&, const QuantRows& x, const GateGroup* groups, int count, Activation activation,                   \
                               const QuantOut& out))                                                                                  \
  KERNEL(void, store_kv, (Pool&, const KVShape&, const float* k, const float* v, const SpanRows* spans, int count))                   \
  KERNEL(void, attention, (Pool&, const KVShape&, const float* q, int heads, const SpanRows* spans, int count, float scale,           \
                           int window, float softcap, const float* sinks, float* out))                                                \
  KERNEL(void, short_conv, (Pool&, const float* x, int channels, int taps, const float* weight, const float* bias, bool silu,          \
                            const StateRows* spans, int count, float* out))                                                           \
  KERNEL(void, decays, (Pool&, const float* x, const float* y, int rows, int heads, const HeadPlaces&, const float* a,                 \
                        const float* bias, float* decay, float* other))                                                               \
  KERNEL(void, lengths, (Pool&, float* x, int rows, size_t stride, int heads, int width, float length, float epsilon))                 \
  KERNEL(void, delta_net, (Pool&, const DeltaShape&, const float* qkv, const float* decay, const float* beta, const StateRows* spans,   \
                           int count, float* out))                                                                                    \
  KERNEL(void, mamba, (Pool&, const MambaShape&, const float* xbc, const float* decay, const float* dt, const float* d,                \
                       const StateRows* spans, int count, float* out))                                                                \
  KERNEL(Summary, summarize, (const float* x, int count, float inverse_temperature))                                                  \
  KERNEL(int, draw, (const float* x, int count, float inverse_temperature, float greatest, double target))                            \
  KERNEL(int, greatest_ids, (const float* x, int count, int k, int32_t* ids))                                                         \
  KERNEL(int, forbid, (float* x, int count, const uint32_t* allowed))                                                                 \
  KERNEL(double, integer_peak, (Pool&))                                                                                               \
  KERNEL(double, read_bandwidth, (Pool&, const uint8_t* memory, size_t size))
// clang-format on

struct Kernels {
  const char* name;
#define EVERWARM_KERNEL(result, name, arguments) result(*name) arguments;
  EVERWARM_KERNELS(EVERWARM_KERNEL)
#undef EVERWARM_KERNEL
};

const Kernels& avx512_kernels();
const Kernels& avx2_kernels();
const Kernels& portable_kernels();

// Raise this when any kernel computes other bits than before: what was cached with the old ones must not be mixed with the new ones.
constexpr int NUMERICS_VERSION = 2;
constexpr int BLOCK = 64;  // tokens per KV block; attention adds up block by block, so it is part of the numerics

// In q8 and q4, keys keep this many of each token's 32 elements as f16: channels of some models are so much greater than others that
// one scale can't serve both.
constexpr int KEY_OUTLIERS = 2;

inline size_t code_bytes(KVType type, int dim) { return size_t(dim) * BLOCK * (type == KVType::f16 ? 4 : type == KVType::q8 ? 2 : 1) / 2; }
inline size_t scale_count(KVType type, int dim) { return type == KVType::f16 ? 0 : size_t(dim / GROUP) * BLOCK; }
inline size_t key_bytes(const KVShape& s) {
  return code_bytes(s.type, s.key_dim) + scale_count(s.type, s.key_dim) * (2 + 3 * KEY_OUTLIERS);
}
inline size_t value_bytes(const KVShape& s) {
  return s.latent ? 0 : code_bytes(s.type, s.value_dim) + scale_count(s.type, s.value_dim) * 2;
}

constexpr size_t exponent_bytes() { return 2 * BLOCK; }  // a byte per key and value of a token and head

// Bytes of one layer's keys and values in a block.
inline size_t kv_layer_bytes(const KVShape& s) { return s.kv_heads * (key_bytes(s) + value_bytes(s) + exponent_bytes()); }

}  // namespace everwarm

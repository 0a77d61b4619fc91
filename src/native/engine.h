// The operations of a step. Each checks its arguments before a kernel sees them, and counts the time it took.
//
// An operation is a method of `Engine` that returns nothing. One line in bindings.cpp offers it to Python, to be done at once
// (`Engine`) or to be remembered (`Tape` in tape.h). It runs without the GIL, so it must not touch Python objects.
#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "batch.h"
#include "buffers.h"
#include "kernels.h"
#include "pack.h"

namespace everwarm {

// A packed matrix; keeps the memory that it lies in alive.
struct Form {
  const TensorType* type;
  Weight weight;       // of a quantised type
  FloatWeight floats;  // of a float type
  nb::object owner;

  Form(const std::string& kind, int outputs, int inputs) : type(find(kind)) {
    if (outputs < 1 || inputs < 1)
      refuse("form: " + std::to_string(outputs) + " x " + std::to_string(inputs) + ", at least 1 x 1 is needed");
    if (padded_elements(outputs, inputs) > MOST_ELEMENTS)
      refuse("form: " + std::to_string(outputs) + " x " + std::to_string(inputs) + " is more than 2^56 elements");
    if (!type || inputs % type->block_inputs) refuse("form: no form for " + std::to_string(inputs) + " inputs of type " + kind);
    weight = type->quantised, floats = type->floats;
    weight.outputs = floats.outputs = outputs, weight.inputs = floats.inputs = inputs;
  }
  bool quantised() const { return type->is_quantised(); }
  int outputs() const { return weight.outputs; }
  int inputs() const { return weight.inputs; }
  size_t bytes() const { return quantised() ? weight.bytes() : floats.bytes(); }
  const uint8_t* data() const { return weight.data; }

  void attach(const uint8_t* data, size_t size, nb::object keep) {
    if (size != bytes()) refuse(std::string("form ") + type->name + ": " + text(size) + " bytes, expected " + text(bytes()));
    if (reinterpret_cast<uintptr_t>(data) % 64) refuse(std::string("form ") + type->name + ": memory is not aligned to 64 bytes");
    weight.data = floats.data = data;
    owner = std::move(keep);
  }

 private:
  static const TensorType* find(const std::string& kind) {
    for (const TensorType& type : tensor_types())
      if (kind == type.name) return &type;
    return nullptr;
  }
};

// Where the time goes; one step runs at a time, so nobody else adds to it.
enum Spent { products_s, attention_s, other_s };

class Timer {
 public:
  explicit Timer(double& total) : total_(total), begin_(std::chrono::steady_clock::now()) {}
  ~Timer() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  double& total_;
  std::chrono::steady_clock::time_point begin_;
};

using Biases = std::vector<std::optional<FloatArray>>;

inline Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  refuse("activation " + name + ": expected silu or gelu");
}

struct Engine {
  const Kernels& k;
  Pool pool;
  double spent[3] = {};

  Engine(const Kernels& kernels, int threads) : k(kernels), pool(threads) {}

  const float* vector(const FloatArray& a, int width, const char* what) {
    if (a.size() != size_t(width)) refuse(std::string(what) + ": " + text(a.size()) + " values, expected " + std::to_string(width));
    return a.data();
  }

  void embed(const Form& table, const IntArray& tokens, Rows& out) {
    const Timer timer(spent[other_s]);
    if (!table.data()) refuse("embed: a form without memory");
    if (out.width() != table.inputs())
      refuse("embed: rows of " + std::to_string(out.width()) + ", the table has " + std::to_string(table.inputs()));
    for (size_t i = 0; i < tokens.size(); i++)
      if (tokens.data()[i] < 0 || tokens.data()[i] >= table.outputs())
        refuse("embed: token " + std::to_string(tokens.data()[i]) + " is not among " + std::to_string(table.outputs()));
    out.resize(int(tokens.size()));
    if (table.quantised())
      dequantize_rows(table.weight, tokens.data(), out.rows(), out.floats(), pool);
    else
      dequantize_float_rows(table.floats, tokens.data(), out.rows(), out.floats(), pool);
  }

  void norm(const Rows& x, const FloatArray& weight, float epsilon, Rows& out, bool quantise) {
    const Timer timer(spent[other_s]);
    const float* w = vector(weight, x.width(), "norm weight");
    if (out.width() != x.width()) refuse("norm: widths differ");
    out.resize(x.rows());
    const bool can = quantise && x.width() % GROUP == 0;
    const QuantOut q = can ? out.quant_out() : QuantOut{};
    k.rms_norm(pool, x.floats(), x.rows(), x.width(), w, epsilon, out.floats(), can ? &q : nullptr);
  }

  void quantise(Rows& x) {
    if (x.width() % GROUP) refuse("quantise: width " + std::to_string(x.width()) + " is not a multiple of 32");
    k.quantize(pool, x.floats(), x.rows(), x.quant_out());
  }

  // Several products that share x. With `add`, the results are added to what the outputs hold.
  void linear(Rows& x, const std::vector<Form*>& forms, const Biases& biases, const std::vector<Rows*>& outs, bool add) {
    const Timer timer(spent[products_s]);
    if (forms.size() != outs.size() || forms.size() != biases.size() || forms.empty()) refuse("linear: one output and one bias per form");
    std::vector<Product> list;
    bool need_codes = false;
    for (size_t i = 0; i < forms.size(); i++) {
      if (!forms[i] || !outs[i]) refuse("linear: None instead of a form or rows");
      const Form& f = *forms[i];
      if (!f.data()) refuse("linear: a form without memory");
      if (f.inputs() != x.width())
        refuse("linear: rows of " + std::to_string(x.width()) + " for a form of " + std::to_string(f.inputs()) + " inputs");
      if (outs[i]->width() != f.outputs())
        refuse("linear: output rows of " + std::to_string(outs[i]->width()) + " for a form of " + std::to_string(f.outputs()) + " outputs");
      if (outs[i] == &x) refuse("linear: output and input are the same rows");
      if (add && outs[i]->rows() != x.rows())
        refuse("linear: can't add " + std::to_string(x.rows()) + " rows to " + std::to_string(outs[i]->rows()));
      if (add)
        outs[i]->floats_changed();
      else
        outs[i]->resize(x.rows());
      const float* bias = biases[i] ? vector(*biases[i], f.outputs(), "bias") : nullptr;
      need_codes |= f.quantised();
      list.push_back(
          {f.quantised() ? &f.weight : nullptr, f.quantised() ? nullptr : &f.floats, bias, outs[i]->floats(), size_t(f.outputs()), add});
    }
    if (need_codes && !x.quantised()) k.quantize(pool, x.floats(), x.rows(), x.quant_out());
    const QuantRows q = x.quant();
    k.products(pool, need_codes ? &q : nullptr, x.floats(), x.rows(), x.width(), list.data(), int(list.size()));
  }

  // activation(x Gate^T) * (x Up^T). Fused and quantised where both are quantised, else step by step.
  void gated(Rows& x, const std::vector<Form*>& gate_up, const Biases& biases, Rows& out, Rows& spare, const std::string& name) {
    const Activation activation = activation_named(name);
    if (gate_up.size() != 2 || biases.size() != 2 || !gate_up[0] || !gate_up[1]) refuse("gated: two forms and two biases");
    const Form &gate = *gate_up[0], &up = *gate_up[1];
    if (!gate.data() || !up.data()) refuse("gated: a form without memory");
    if (&out == &x || &spare == &x || &out == &spare) refuse("gated: input, output and spare rows must be different rows");
    if (gate.outputs() != up.outputs() || out.width() != gate.outputs()) refuse("gated: widths of gate, up and output differ");
    if (gate.quantised() && up.quantised() && gate.outputs() % GROUP == 0 && !biases[0] && !biases[1] && gate.inputs() == x.width() &&
        up.inputs() == x.width()) {
      const Timer timer(spent[products_s]);
      if (!x.quantised()) k.quantize(pool, x.floats(), x.rows(), x.quant_out());
      out.resize(x.rows());
      k.gated(pool, x.quant(), gate.weight, up.weight, activation, out.quant_out());
      return;
    }
    linear(x, gate_up, biases, {&out, &spare}, false);
    k.gate_floats(pool, out.floats(), spare.floats(), size_t(out.rows()) * out.width(), activation);
  }

  // Each head of each row by itself, in place.
  void norm_heads(Rows& x, const FloatArray& weight, float epsilon, int heads) {
    const Timer timer(spent[other_s]);
    if (heads < 1 || x.width() % heads)
      refuse("norm_heads: " + std::to_string(x.width()) + " elements in " + std::to_string(heads) + " heads");
    const float* w = vector(weight, x.width() / heads, "norm weight of a head");
    if (int64_t(x.rows()) * heads > INT32_MAX)
      refuse("norm_heads: " + std::to_string(x.rows()) + " rows of " + std::to_string(heads) + " heads, at most 2^31 - 1 heads in all");
    x.floats_changed();
    k.rms_norm(pool, x.floats(), x.rows() * heads, x.width() / heads, w, epsilon, x.floats(), nullptr);
  }

  void rotate(Rows& x, int heads, const Batch& batch, int rope) {
    const Timer timer(spent[other_s]);
    if (rope < 0 || size_t(rope) >= batch.rotaries.size())
      refuse("rotate: rotary " + std::to_string(rope) + " of " + text(batch.rotaries.size()));
    const auto& [adjacent, pairs, cosine, sine] = batch.rotaries[rope];
    if (heads < 1 || x.width() % heads || x.width() / heads < 2 * pairs)
      refuse("rotate: " + std::to_string(x.width()) + " elements in " + std::to_string(heads) + " heads");
    if (x.rows() != batch.rows) refuse("rotate: " + std::to_string(x.rows()) + " rows, the batch has " + std::to_string(batch.rows));
    x.floats_changed();
    k.rotate(pool, x.floats(), x.rows(), heads, x.width() / heads, cosine.data(), sine.data(), pairs, adjacent);
  }

  void store_kv(const KVPool& kv, int layer, const Rows& keys, const Rows& values, Batch& batch) {
    const Timer timer(spent[attention_s]);
    const int width = kv.shape().kv_heads * kv.shape().head_dim;
    if (keys.width() != width || values.width() != width || keys.rows() != batch.rows || values.rows() != batch.rows)
      refuse("store_kv: keys and values must be (" + std::to_string(batch.rows) + ", " + std::to_string(width) + ")");
    const auto& spans = batch.at_layer(kv, layer);
    k.store_kv(pool, kv.shape(), keys.floats(), values.floats(), spans.data(), int(spans.size()));
  }

  void attention(const KVPool& kv, int layer, const Rows& q, Batch& batch, float scale, int window, float softcap, Rows& out) {
    const Timer timer(spent[attention_s]);
    const KVShape& s = kv.shape();
    const int heads = q.width() / s.head_dim;
    if (q.width() % s.head_dim || heads % s.kv_heads || q.rows() != batch.rows || out.width() != q.width())
      refuse("attention: queries must be (" + std::to_string(batch.rows) + ", multiple of " + std::to_string(s.kv_heads * s.head_dim) +
             ")");
    if (&out == &q) refuse("attention: queries and output are the same rows");
    const auto& spans = batch.at_layer(kv, layer);
    out.resize(q.rows());
    k.attention(pool, s, q.floats(), heads, spans.data(), int(spans.size()), scale, window, softcap, out.floats());
  }
};

}  // namespace everwarm

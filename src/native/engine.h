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
  if (name == "clamped") return Activation::clamped;
  refuse("activation " + name + ": expected silu, gelu or clamped");
}

// Those that are computed from floats.
inline Activation gate_named(const std::string& name) {
  if (name == "sigmoid") return Activation::sigmoid;
  if (name == "product") return Activation::product;
  if (name == "positive") return Activation::positive;
  return activation_named(name);
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

  // For every row, on all threads.
  template <class Do>
  void in_rows(int rows, Do&& one) {
    constexpr int STEP = 16;
    pool.run((rows + STEP - 1) / STEP, [&](int chunk, int) {
      for (int r = chunk * STEP; r < rows && r < (chunk + 1) * STEP; r++) one(r);
    });
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
    k.rms_norm(pool, x.floats(), x.rows(), x.width(), w, 1, epsilon, out.floats(), can ? &q : nullptr);
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

  // What is positive of x Up^T, squared.
  void squared(Rows& x, const Form& up, const std::optional<FloatArray>& bias, Rows& out) {
    linear(x, {const_cast<Form*>(&up)}, {bias}, {&out}, false);
    k.gate_floats(pool, out.floats(), out.floats(), size_t(out.rows()) * out.width(), Activation::positive);
  }

  // x plus y times a scale.
  void add(Rows& x, const Rows& y, float scale) {
    const Timer timer(spent[other_s]);
    if (&x == &y) refuse("add: both are the same rows");
    if (x.width() != y.width() || x.rows() != y.rows())
      refuse("add: (" + std::to_string(y.rows()) + ", " + std::to_string(y.width()) + ") to (" + std::to_string(x.rows()) + ", " +
             std::to_string(x.width()) + ")");
    x.floats_changed();
    k.add_scaled(pool, x.floats(), y.floats(), size_t(x.rows()) * x.width(), scale);
  }

  void scale(Rows& x, float factor, float softcap) {
    const Timer timer(spent[other_s]);
    x.floats_changed();
    k.scale_floats(pool, x.floats(), size_t(x.rows()) * x.width(), factor, softcap);
  }

  // Which experts each row takes. The router computes on floats: a rounded score would change who is chosen.
  void route(Rows& x, const Form& router, const std::optional<FloatArray>& bias, const std::optional<FloatArray>& selection_bias,
             const std::optional<FloatArray>& expert_scales, Rows& scores, Routing& out) {
    if (router.quantised()) refuse(std::string("route: a router of type ") + router.type->name + ", floats are needed");
    if (router.outputs() != out.shape.experts)
      refuse("route: a router of " + std::to_string(router.outputs()) + " outputs for " + std::to_string(out.shape.experts) + " experts");
    linear(x, {const_cast<Form*>(&router)}, {bias}, {&scores}, false);
    const Timer timer(spent[other_s]);
    const float* selection = selection_bias ? vector(*selection_bias, out.shape.experts, "selection bias") : nullptr;
    out.resize(x.rows());
    k.route(pool, scores.floats(), x.rows(), out.shape, selection, out.chosen.data(), out.weights.data());
    if (!expert_scales) return;
    const float* scales = vector(*expert_scales, out.shape.experts, "scales of experts");
    for (size_t i = 0; i < out.chosen.size(); i++) out.weights[i] *= scales[out.chosen[i]];
  }

  // The activation of x times what stands beside it.
  void gate(Rows& x, const Rows& up, const std::string& activation) {
    const Timer timer(spent[other_s]);
    if (&x == &up || x.width() != up.width() || x.rows() != up.rows()) refuse("gate: two rows of the same shape");
    x.floats_changed();
    k.gate_floats(pool, x.floats(), up.floats(), size_t(x.rows()) * x.width(), gate_named(activation));
  }

  // What the chosen experts give for each row, weighted. Rows are taken expert by expert; a form may be missing if nobody has chosen
  // its expert. With the activation `positive`, no expert has a gate. `some`, `hidden`, `spare` and `given` are rows to work with, `each`
  // has room for what every expert of a row gives.
  void experts(Rows& x, const Routing& routing, const std::vector<Form*>& gates, const std::vector<Form*>& ups,
               const std::vector<Form*>& downs, const Biases& gate_biases, const Biases& up_biases, const Biases& down_biases,
               const std::string& activation, const std::vector<Rows*>& work, Rows& out) {
    const size_t count = routing.shape.experts;
    if (gates.size() != count || ups.size() != count || downs.size() != count || gate_biases.size() != count || up_biases.size() != count ||
        down_biases.size() != count)
      refuse("experts: forms and biases must be " + text(count));
    if (work.size() != 5) refuse("experts: five rows to work with");
    for (const Rows* rows : work)
      if (!rows || rows == &x || rows == &out) refuse("experts: rows to work with must be other rows");
    if (routing.rows != x.rows()) refuse("experts: " + std::to_string(x.rows()) + " rows, routed were " + std::to_string(routing.rows));
    Rows &hidden = *work[1], &given = *work[3], &each = *work[4];
    const int used = routing.shape.used;
    const bool has_gates = activation != "positive";
    if (out.width() != each.width() || each.width() != given.width()) refuse("experts: widths of outputs differ");
    // Rows by expert: where each of them comes from, and where each choice of a row has gone.
    std::vector<int> starts(count + 1), from(size_t(x.rows()) * used), places(from.size());
    for (int expert : routing.chosen) starts[expert + 1]++;
    for (size_t e = 0; e < count; e++) starts[e + 1] += starts[e];
    std::vector<int> next(starts.begin(), starts.end() - 1);
    for (size_t i = 0; i < places.size(); i++) places[i] = next[routing.chosen[i]]++, from[places[i]] = int(i) / used;
    bool codes = true, floats = false;
    std::vector<size_t> chosen;
    for (size_t e = 0; e < count; e++)
      if (starts[e] < starts[e + 1]) {
        if (!ups[e] || !downs[e] || (has_gates && !gates[e])) refuse("experts: expert " + text(e) + " was chosen and has no forms");
        if (!has_gates && gates[e]) refuse("experts: expert " + text(e) + " has a gate, positive takes none");
        const bool gate_codes = !has_gates || gates[e]->quantised();
        codes &= gate_codes && ups[e]->quantised() && downs[e]->quantised();
        floats |= !gate_codes || !ups[e]->quantised();
        chosen.push_back(e);
      }
    if (codes && hidden.width() % GROUP == 0)
      experts_at_once(x, chosen, starts, from, gates, ups, downs, gate_biases, up_biases, down_biases, activation, work);
    else
      experts_one_by_one(x, chosen, starts, from, gates, ups, downs, gate_biases, up_biases, down_biases, activation, floats, work);
    const Timer timer(spent[other_s]);
    out.resize(x.rows());
    k.combine(pool, each.floats(), places.data(), routing.weights.data(), x.rows(), used, out.width(), out.floats());
  }

  // All chosen experts in two calls.
  void experts_at_once(Rows& x, const std::vector<size_t>& chosen, const std::vector<int>& starts, const std::vector<int>& from,
                       const std::vector<Form*>& gates, const std::vector<Form*>& ups, const std::vector<Form*>& downs,
                       const Biases& gate_biases, const Biases& up_biases, const Biases& down_biases, const std::string& activation,
                       const std::vector<Rows*>& work) {
    const Timer timer(spent[products_s]);
    Rows &some = *work[0], &hidden = *work[1], &each = *work[4];
    if (!x.quantised()) k.quantize(pool, x.floats(), x.rows(), x.quant_out());
    some.gather(x, from.data(), int(from.size()), false, pool);
    std::vector<GateGroup> inner;
    std::vector<RowGroup> outer;
    hidden.resize(some.rows()), each.resize(some.rows());
    for (size_t e : chosen) {
      const Form &up = *ups[e], &down = *downs[e];
      const Form& gate = gates[e] ? *gates[e] : up;  // without one: `up` is looked at twice
      if (!gate.data() || !up.data() || !down.data()) refuse("experts: a form without memory");
      if (gate.inputs() != x.width() || up.inputs() != x.width() || gate.outputs() != hidden.width() || up.outputs() != hidden.width() ||
          down.inputs() != hidden.width() || down.outputs() != each.width())
        refuse("experts: forms of expert " + text(e) + " have other shapes");
      const auto bias = [&](const Biases& all, int width) { return all[e] ? vector(*all[e], width, "bias") : nullptr; };
      const int first = starts[e], rows = starts[e + 1] - first;
      inner.push_back(
          {first, rows, gates[e] ? &gate.weight : nullptr, &up.weight, bias(gate_biases, hidden.width()), bias(up_biases, hidden.width())});
      outer.push_back({first,
                       rows,
                       {&down.weight, nullptr, bias(down_biases, each.width()), each.floats() + size_t(first) * each.width(),
                        size_t(each.width()), false}});
    }
    const Activation kind = activation == "positive" ? Activation::positive : activation_named(activation);
    k.grouped_gated(pool, some.quant(), inner.data(), int(inner.size()), kind, hidden.quant_out());
    const QuantRows q = hidden.quant();
    k.grouped_products(pool, &q, hidden.floats(), hidden.width(), outer.data(), int(outer.size()));
  }

  void experts_one_by_one(Rows& x, const std::vector<size_t>& chosen, const std::vector<int>& starts, const std::vector<int>& from,
                          const std::vector<Form*>& gates, const std::vector<Form*>& ups, const std::vector<Form*>& downs,
                          const Biases& gate_biases, const Biases& up_biases, const Biases& down_biases, const std::string& activation,
                          bool floats, const std::vector<Rows*>& work) {
    Rows &some = *work[0], &hidden = *work[1], &spare = *work[2], &given = *work[3], &each = *work[4];
    each.resize(int(from.size()));
    for (size_t e : chosen) {
      const int first = starts[e], rows = starts[e + 1] - first;
      some.gather(x, from.data() + first, rows, floats || !x.quantised(), pool);
      if (gates[e])
        gated(some, {gates[e], ups[e]}, {gate_biases[e], up_biases[e]}, hidden, spare, activation);
      else
        squared(some, *ups[e], up_biases[e], hidden);
      linear(hidden, {downs[e]}, {down_biases[e]}, {&given}, false);
      std::memcpy(each.floats() + size_t(first) * each.width(), given.floats(), size_t(rows) * each.width() * 4);
    }
  }

  // Each row of x times the sigmoid of that row of h times a vector.
  void weigh(Rows& x, const Rows& h, const FloatArray& by) {
    const Timer timer(spent[other_s]);
    const float* v = vector(by, h.width(), "weight of a gate");
    if (x.rows() != h.rows()) refuse("weigh: " + std::to_string(x.rows()) + " rows by " + std::to_string(h.rows()));
    x.floats_changed();
    k.weigh(pool, x.floats(), x.width(), h.floats(), h.width(), v, x.rows());
  }

  // Each head of each row by itself, in place.
  void norm_heads(Rows& x, const FloatArray& weight, float epsilon, int heads) {
    const Timer timer(spent[other_s]);
    if (heads < 1 || x.width() % heads)
      refuse("norm_heads: " + std::to_string(x.width()) + " elements in " + std::to_string(heads) + " heads");
    const bool each = heads > 1 && weight.size() == size_t(x.width());  // every head has weights of its own
    const float* w = vector(weight, each ? x.width() : x.width() / heads, "norm weight of a head");
    if (int64_t(x.rows()) * heads > INT32_MAX)
      refuse("norm_heads: " + std::to_string(x.rows()) + " rows of " + std::to_string(heads) + " heads, at most 2^31 - 1 heads in all");
    x.floats_changed();
    k.rms_norm(pool, x.floats(), x.rows() * heads, x.width() / heads, w, each ? heads : 1, epsilon, x.floats(), nullptr);
  }

  void rotate(Rows& x, int heads, const Batch& batch, int rope, int offset) {
    const Timer timer(spent[other_s]);
    if (rope < 0 || size_t(rope) >= batch.rotaries.size())
      refuse("rotate: rotary " + std::to_string(rope) + " of " + text(batch.rotaries.size()));
    const auto& [adjacent, pairs, cosine, sine] = batch.rotaries[rope];
    if (heads < 1 || x.width() % heads || offset < 0 || x.width() / heads - offset < 2 * pairs)
      refuse("rotate: " + std::to_string(x.width()) + " elements in " + std::to_string(heads) + " heads");
    if (x.rows() != batch.rows) refuse("rotate: " + std::to_string(x.rows()) + " rows, the batch has " + std::to_string(batch.rows));
    x.floats_changed();
    k.rotate(pool, x.floats(), x.rows(), heads, x.width() / heads, offset, cosine.data(), sine.data(), pairs, adjacent);
  }

  // One product for each head: of the elements of x from `offset` in the head on, into those of `out` from `out_offset` on.
  void by_head(const Rows& x, int offset, const std::vector<Form*>& forms, Rows& work, Rows& out, int out_offset) {
    const Timer timer(spent[products_s]);
    const int heads = int(forms.size());
    if (!heads || !forms[0]) refuse("by_head: one form for each head");
    const int inputs = forms[0]->inputs(), outputs = forms[0]->outputs(), rows = x.rows();
    bool codes = false;
    for (const Form* form : forms) {
      if (!form || !form->data()) refuse("by_head: a form without memory");
      if (form->inputs() != inputs || form->outputs() != outputs) refuse("by_head: forms of different shapes");
      codes |= form->quantised();
    }
    const int stride = x.width() / heads, out_stride = out.width() / heads;
    if (x.width() % heads || out.width() % heads || offset < 0 || offset + inputs > stride || out_offset < 0 ||
        out_offset + outputs > out_stride || work.width() != inputs || &work == &x || &out == &x || &work == &out)
      refuse("by_head: " + std::to_string(heads) + " forms of " + std::to_string(outputs) + " x " + std::to_string(inputs) +
             " for heads of " + std::to_string(stride) + " and " + std::to_string(out_stride));
    work.resize(rows * heads);
    in_rows(rows, [&](int r) {
      for (int h = 0; h < heads; h++)
        std::memcpy(work.floats() + (size_t(h) * rows + r) * inputs, x.floats() + size_t(r) * x.width() + h * stride + offset, inputs * 4);
    });
    if (codes) {
      if (inputs % GROUP) refuse("by_head: " + std::to_string(inputs) + " inputs, a multiple of 32 is needed");
      k.quantize(pool, work.floats(), work.rows(), work.quant_out());
    }
    if (out.rows() != rows) out.resize(rows);
    out.floats_changed();
    std::vector<RowGroup> groups;
    for (int h = 0; h < heads; h++) {
      const Form& f = *forms[h];
      groups.push_back({h * rows,
                        rows,
                        {f.quantised() ? &f.weight : nullptr, f.quantised() ? nullptr : &f.floats, nullptr,
                         out.floats() + size_t(h) * out_stride + out_offset, size_t(out.width()), false}});
    }
    const QuantRows q = work.quant();
    k.grouped_products(pool, codes ? &q : nullptr, work.floats(), inputs, groups.data(), heads);
  }

  // In each head: `width` elements of x from `offset` on, to those of `out` from `out_offset` on.
  void copy_heads(const Rows& x, int heads, int offset, int width, Rows& out, int out_offset) {
    const Timer timer(spent[other_s]);
    const int stride = heads > 0 ? x.width() / heads : 0, out_stride = heads > 0 ? out.width() / heads : 0;
    if (heads < 1 || x.width() % heads || out.width() % heads || offset < 0 || out_offset < 0 || width < 0 || offset + width > stride ||
        out_offset + width > out_stride || &x == &out)
      refuse("copy_heads: " + std::to_string(width) + " elements of heads of " + std::to_string(stride) + " to heads of " +
             std::to_string(out_stride));
    if (out.rows() != x.rows()) out.resize(x.rows());
    out.floats_changed();
    in_rows(x.rows(), [&](int r) {
      for (int h = 0; h < heads; h++)
        std::memcpy(out.floats() + size_t(r) * out.width() + h * out_stride + out_offset,
                    x.floats() + size_t(r) * x.width() + h * stride + offset, size_t(width) * 4);
    });
  }

  // Values may be missing where they are the beginnings of keys.
  void store_kv(const KVPool& kv, int layer, const Rows& keys, const Rows* values, Batch& batch) {
    const Timer timer(spent[attention_s]);
    const KVShape& s = kv.shape(layer);
    if (!values != s.latent) refuse(s.latent ? "store_kv: values are the beginnings of keys here" : "store_kv: no values");
    if (keys.width() != s.kv_heads * s.key_dim || keys.rows() != batch.rows ||
        (values && (values->width() != s.kv_heads * s.value_dim || values->rows() != batch.rows)))
      refuse("store_kv: keys and values must be " + std::to_string(batch.rows) + " rows of " + std::to_string(s.kv_heads * s.key_dim) +
             " and " + std::to_string(s.kv_heads * s.value_dim));
    const auto& spans = batch.at_layer(kv, layer);
    k.store_kv(pool, s, keys.floats(), values ? values->floats() : nullptr, spans.data(), int(spans.size()));
  }

  void attention(const KVPool& kv, int layer, const Rows& q, Batch& batch, float scale, int window, float softcap, Rows& out,
                 const std::optional<FloatArray>& sinks) {
    const Timer timer(spent[attention_s]);
    const KVShape& s = kv.shape(layer);
    const int heads = q.width() / s.key_dim;
    if (q.width() % s.key_dim || heads % s.kv_heads || q.rows() != batch.rows || out.width() != heads * s.value_dim)
      refuse("attention: queries must be (" + std::to_string(batch.rows) + ", multiple of " + std::to_string(s.kv_heads * s.key_dim) + ")");
    if (&out == &q) refuse("attention: queries and output are the same rows");
    batch.check_window(kv, window);
    const auto& spans = batch.at_layer(kv, layer);
    out.resize(q.rows());
    const float* sink = sinks ? vector(*sinks, heads, "sinks") : nullptr;
    k.attention(pool, s, q.floats(), heads, spans.data(), int(spans.size()), scale, window, softcap, sink, out.floats());
  }

  // Layers with a state. `place`: where the layer's part of a state begins, in floats.
  void short_conv(const KVPool& states, int place, const Rows& x, const FloatArray& weight, const std::optional<FloatArray>& bias,
                  bool silu, Batch& batch, Rows& out) {
    const Timer timer(spent[attention_s]);
    const int channels = x.width(), taps = channels ? int(weight.size() / channels) : 0;
    if (taps < 1 || weight.size() != size_t(taps) * channels || x.rows() != batch.rows || out.width() != channels || &x == &out)
      refuse("short_conv: " + std::to_string(batch.rows) + " rows of " + std::to_string(channels) + " channels and as many times the taps");
    const float* b = bias ? vector(*bias, channels, "bias of a convolution") : nullptr;
    const auto& spans = batch.states_at(states, place, size_t(taps - 1) * channels);
    out.resize(x.rows());
    k.short_conv(pool, x.floats(), channels, taps, weight.data(), b, silu, spans.data(), int(spans.size()), out.floats());
  }

  // Queries and keys of `qkv` are normed in place. `alternating`: beta and alpha lie in the same rows, those of each key head together.
  void delta_net(const KVPool& states, int place, const std::vector<int>& shape, bool interleaved, bool alternating, Rows& qkv,
                 const Rows& beta, const Rows& alpha, const FloatArray& a, const FloatArray& bias, Batch& batch, Rows& scratch, Rows& out) {
    const Timer timer(spent[attention_s]);
    if (shape.size() != 4) refuse("delta_net: key heads, value heads and the elements of each");
    const DeltaShape s{shape[0], shape[1], shape[2], shape[3], interleaved};
    const int heads = s.value_heads, rows = batch.rows, given = alternating ? 2 * heads : heads;
    if (s.key_heads < 1 || heads % s.key_heads || s.key_dim < 16 || s.key_dim % 16 || s.value_dim < STATE_TILE || s.value_dim % STATE_TILE)
      refuse("delta_net: heads of a multiple of 16 and " + std::to_string(STATE_TILE) + " elements");
    if (qkv.width() != 2 * s.key_heads * s.key_dim + heads * s.value_dim || qkv.rows() != rows || beta.width() != given ||
        alpha.width() != given || beta.rows() != rows || alpha.rows() != rows || out.width() != heads * s.value_dim ||
        scratch.width() != 2 * heads || (alternating && &beta != &alpha))
      refuse("delta_net: rows of another width");
    const float *decay_of = vector(a, heads, "decays"), *shift = vector(bias, heads, "bias of time steps");
    const auto& spans = batch.states_at(states, place, size_t(heads) * s.key_dim * s.value_dim);
    qkv.floats_changed(), out.resize(rows), scratch.resize(rows);
    float *decay = scratch.floats(), *weight = decay + size_t(rows) * heads;
    const HeadPlaces places{size_t(given), alternating ? heads / s.key_heads : 0};
    k.decays(pool, alpha.floats(), beta.floats(), rows, heads, places, decay_of, shift, decay, weight);
    const size_t width = qkv.width();
    k.lengths(pool, qkv.floats(), rows, width, s.key_heads, s.key_dim, 1.f / std::sqrt(float(s.key_dim)), 1e-6f);
    k.lengths(pool, qkv.floats() + s.key_heads * s.key_dim, rows, width, s.key_heads, s.key_dim, 1.f, 1e-6f);
    k.delta_net(pool, s, qkv.floats(), decay, weight, spans.data(), int(spans.size()), out.floats());
  }

  void mamba(const KVPool& states, int place, const std::vector<int>& shape, const Rows& xbc, const Rows& dt, const FloatArray& a,
             const FloatArray& bias, const FloatArray& skip, Batch& batch, Rows& scratch, Rows& out) {
    const Timer timer(spent[attention_s]);
    if (shape.size() != 4) refuse("mamba: heads, groups, elements of a head and of a state");
    const MambaShape s{shape[0], shape[1], shape[2], shape[3]};
    const int rows = batch.rows;
    if (s.groups < 1 || s.heads % s.groups || s.head_dim < STATE_TILE || s.head_dim % STATE_TILE || s.state < 4 || s.state % 4)
      refuse("mamba: heads of a multiple of " + std::to_string(STATE_TILE) + " elements, states of a multiple of 4");
    if (xbc.width() != s.heads * s.head_dim + 2 * s.groups * s.state || xbc.rows() != rows || dt.width() != s.heads || dt.rows() != rows ||
        out.width() != s.heads * s.head_dim || scratch.width() != 2 * s.heads)
      refuse("mamba: rows of another width");
    const float *decay_of = vector(a, s.heads, "decays"), *shift = vector(bias, s.heads, "bias of time steps"),
                *through = vector(skip, s.heads, "skip weights");
    const auto& spans = batch.states_at(states, place, size_t(s.heads) * s.head_dim * s.state);
    out.resize(rows), scratch.resize(rows);
    float *decay = scratch.floats(), *step = decay + size_t(rows) * s.heads;
    k.decays(pool, dt.floats(), nullptr, rows, s.heads, {size_t(s.heads), 0}, decay_of, shift, decay, step);
    k.mamba(pool, s, xbc.floats(), decay, step, through, spans.data(), int(spans.size()), out.floats());
  }
};

}  // namespace everwarm

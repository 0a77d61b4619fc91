// The Python face of the native core. Arguments are checked here, before any kernel sees them; the GIL is released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>

#include "buffers.h"
#include "cpu.h"
#include "kernels.h"
#include "pack.h"
#include "rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace everwarm {

namespace {

using ByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatArray = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<nb::numpy, float, nb::ndim<2>, nb::c_contig>;
using IntArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

std::string text(size_t n) { return std::to_string(n); }

bool float_type(const std::string& type, Floats& out) {
  if (type == "F32") return out = Floats::f32, true;
  if (type == "F16") return out = Floats::f16, true;
  if (type == "BF16") return out = Floats::bf16, true;
  return false;
}

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  refuse("activation " + name + ": expected silu or gelu");
}

// A packed matrix; keeps the memory that it lies in alive.
struct Form {
  std::string type;
  bool quantised;
  Weight weight;
  FloatWeight floats;
  nb::object owner;

  Form(const std::string& type, int outputs, int inputs) : type(type) {
    if (outputs < 1 || inputs < 1)
      refuse("form: " + std::to_string(outputs) + " x " + std::to_string(inputs) + ", at least 1 x 1 is needed");
    if (padded_elements(outputs, inputs) > MOST_ELEMENTS)
      refuse("form: " + std::to_string(outputs) + " x " + std::to_string(inputs) + " is more than 2^56 elements");
    Floats f;
    quantised = !float_type(type, f);
    if (!quantised)
      floats = {f, outputs, inputs, nullptr};
    else if (!form_of(type, outputs, inputs, weight))
      refuse("form: no form for " + std::to_string(inputs) + " inputs of type " + type);
  }
  int outputs() const { return quantised ? weight.outputs : floats.outputs; }
  int inputs() const { return quantised ? weight.inputs : floats.inputs; }
  size_t bytes() const { return quantised ? weight.bytes() : floats.bytes(); }
  void attach(const uint8_t* data, size_t size, nb::object keep) {
    if (size != bytes()) refuse("form " + type + ": " + text(size) + " bytes, expected " + text(bytes()));
    if (reinterpret_cast<uintptr_t>(data) % 64) refuse("form " + type + ": memory is not aligned to 64 bytes");
    weight.data = floats.data = data;
    owner = std::move(keep);
  }
};

// Spans of sequences in one step, with their rotary tables.
struct Batch {
  struct Span {
    int first, count, start;
    std::vector<int> blocks;
  };
  std::vector<Span> spans;
  // Cosine and sine of every row and pair; layers may rotate in different ways.
  struct Rotary {
    bool adjacent;
    int pairs;
    std::vector<float> cosine, sine;
  };
  int rows = 0;
  std::vector<Rotary> rotaries;
  std::vector<uint8_t*> bases;     // of the blocks of all spans, one after the other
  std::vector<uint8_t*> pointers;  // scratch of a call
  std::vector<SpanRows> layer_spans;

  void add(int start, int count, std::vector<int> blocks) {
    if (start < 0 || count < 0)
      refuse("span: start " + std::to_string(start) + ", count " + std::to_string(count) + ", neither may be negative");
    if (blocks.size() * BLOCK < size_t(start) + count)
      refuse("span: " + text(blocks.size()) + " blocks can't hold " + text(size_t(start) + count) + " tokens");
    spans.push_back({rows, count, start, std::move(blocks)});
    rows += count;
  }
  void add_rotary(FloatArray frequencies, double magnitude, bool adjacent) {
    const int pairs = int(frequencies.size());
    rotaries.push_back({adjacent, pairs, std::vector<float>(size_t(rows) * pairs), std::vector<float>(size_t(rows) * pairs)});
    auto& [_, __, cosine, sine] = rotaries.back();
    for (const Span& span : spans)
      for (int r = 0; r < span.count; r++)
        for (int i = 0; i < pairs; i++) {
          const float angle = float(span.start + r) * frequencies.data()[i];
          double s, c;
          sine_cosine(angle, s, c);
          const size_t at = size_t(span.first + r) * pairs + i;
          sine[at] = float(s * magnitude), cosine[at] = float(c * magnitude);
        }
  }
  // Find the blocks in a pool. With the GIL, which guards the pool's tables: operations run without it. Blocks don't move.
  void place(const KVPool& pool) {
    bases.clear();
    for (const Span& span : spans)
      for (int id : span.blocks) bases.push_back(pool.data(id));
  }
  // Where this layer's part of every block is.
  const std::vector<SpanRows>& at_layer(const KVPool& pool, int layer) {
    if (layer < 0 || layer >= pool.layers())
      throw std::out_of_range("layer " + std::to_string(layer) + " of " + std::to_string(pool.layers()));
    pointers.clear(), layer_spans.clear();
    pointers.reserve(bases.size());
    for (uint8_t* base : bases) pointers.push_back(base + layer * kv_layer_bytes(pool.shape()));
    size_t from = 0;
    for (const Span& span : spans) {
      if (from + span.blocks.size() > pointers.size()) refuse("batch: its blocks have no place yet");
      layer_spans.push_back({span.first, span.count, span.start, pointers.data() + from});
      from += span.blocks.size();
    }
    return layer_spans;
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
    if (out.width() != table.inputs())
      refuse("embed: rows of " + std::to_string(out.width()) + ", the table has " + std::to_string(table.inputs()));
    for (size_t i = 0; i < tokens.size(); i++)
      if (tokens.data()[i] < 0 || tokens.data()[i] >= table.outputs())
        refuse("embed: token " + std::to_string(tokens.data()[i]) + " is not among " + std::to_string(table.outputs()));
    out.resize(int(tokens.size()));
    if (table.quantised)
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
      if (!(f.quantised ? f.weight.data : f.floats.data)) refuse("linear: a form without memory");
      if (f.inputs() != x.width())
        refuse("linear: rows of " + std::to_string(x.width()) + " for a form of " + std::to_string(f.inputs()) + " inputs");
      if (outs[i]->width() != f.outputs())
        refuse("linear: output rows of " + std::to_string(outs[i]->width()) + " for a form of " + std::to_string(f.outputs()) + " outputs");
      if (outs[i] == &x) refuse("linear: output and input are the same rows");
      if (add && outs[i]->rows() != x.rows())
        refuse("linear: can't add " + std::to_string(x.rows()) + " rows to " + std::to_string(outs[i]->rows()));
      if (!add) outs[i]->resize(x.rows());
      const float* bias = biases[i] ? vector(*biases[i], f.outputs(), "bias") : nullptr;
      need_codes |= f.quantised;
      list.push_back(
          {f.quantised ? &f.weight : nullptr, f.quantised ? nullptr : &f.floats, bias, outs[i]->floats(), size_t(f.outputs()), add});
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
    if (gate.outputs() != up.outputs() || out.width() != gate.outputs()) refuse("gated: widths of gate, up and output differ");
    if (gate.quantised && up.quantised && gate.outputs() % GROUP == 0 && !biases[0] && !biases[1] && gate.inputs() == x.width() &&
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
    const auto& spans = batch.at_layer(kv, layer);
    out.resize(q.rows());
    k.attention(pool, s, q.floats(), heads, spans.data(), int(spans.size()), scale, window, softcap, out.floats());
  }
};

// Operations of a step that are remembered, to be done again over other batches without asking Python. Its methods are those of the
// engine; whoever records keeps the forms and rows alive (keep_alive below), vectors of floats are kept here.
struct Tape {
  std::vector<std::function<void(Engine&, Batch&)>> operations;

  void norm(const Rows& x, FloatArray weight, float epsilon, Rows& out, bool quantise) {
    operations.push_back(
        [&x, weight = std::move(weight), epsilon, &out, quantise](Engine& e, Batch&) { e.norm(x, weight, epsilon, out, quantise); });
  }
  void linear(Rows& x, std::vector<Form*> forms, Biases biases, std::vector<Rows*> outs, bool add) {
    operations.push_back([&x, forms = std::move(forms), biases = std::move(biases), outs = std::move(outs), add](Engine& e, Batch&) {
      e.linear(x, forms, biases, outs, add);
    });
  }
  void gated(Rows& x, std::vector<Form*> gate_up, Biases biases, Rows& out, Rows& spare, std::string activation) {
    operations.push_back([&x, gate_up = std::move(gate_up), biases = std::move(biases), &out, &spare, activation = std::move(activation)](
                             Engine& e, Batch&) { e.gated(x, gate_up, biases, out, spare, activation); });
  }
  void norm_heads(Rows& x, FloatArray weight, float epsilon, int heads) {
    operations.push_back([&x, weight = std::move(weight), epsilon, heads](Engine& e, Batch&) { e.norm_heads(x, weight, epsilon, heads); });
  }
  void rotate(Rows& x, int heads, const Batch&, int rope) {
    operations.push_back([&x, heads, rope](Engine& e, Batch& batch) { e.rotate(x, heads, batch, rope); });
  }
  void store_kv(const KVPool& kv, int layer, const Rows& keys, const Rows& values, const Batch&) {
    operations.push_back([&kv, layer, &keys, &values](Engine& e, Batch& batch) { e.store_kv(kv, layer, keys, values, batch); });
  }
  void attention(const KVPool& kv, int layer, const Rows& q, const Batch&, float scale, int window, float softcap, Rows& out) {
    operations.push_back([&kv, layer, &q, scale, window, softcap, &out](Engine& e, Batch& batch) {
      e.attention(kv, layer, q, batch, scale, window, softcap, out);
    });
  }
};

const Kernels& kernels_named(const std::string& isa) {
  const auto supported = supported_isas();
  for (const auto& name : supported)
    if (name == isa) {
#if defined(__x86_64__)
      if (isa == "avx512") return avx512_kernels();
      if (isa == "avx2") return avx2_kernels();
#endif
      return portable_kernels();
    }
  std::string known;
  for (const auto& name : supported) known += (known.empty() ? "" : ", ") + name;
  refuse("instruction set " + isa + " is not supported here; supported are " + known);
}

FloatMatrix view(Rows& rows, nb::handle self) { return FloatMatrix(rows.floats(), {size_t(rows.rows()), size_t(rows.width())}, self); }

}  // namespace
}  // namespace everwarm

NB_MODULE(_native, m) {
  using namespace everwarm;
  m.doc() = "everwarm's native core";
  nb::set_leak_warnings(false);  // a model that nobody closed before the interpreter ends is no news to a user
  m.attr("BLOCK") = BLOCK;
  m.attr("GROUP") = GROUP;
  m.attr("NUMERICS_VERSION") = NUMERICS_VERSION;

  nb::class_<Cpu>(m, "Cpu").def_ro("model", &Cpu::model).def_ro("features", &Cpu::features);
  m.def("detect_cpu", &detect_cpu, "What this processor can do.");
  m.def("supported_isas", &supported_isas, "Instruction sets that kernels exist for and this processor has, best first.");

  m.def(
      "summarize",
      [](FloatArray logits, double temperature, const std::string& isa) {
        if (!logits.size() || logits.size() > INT32_MAX) refuse("summarize: a row of " + text(logits.size()));
        if (!(temperature > 0)) refuse("summarize: temperature must be above 0");
        const Summary s = kernels_named(isa.empty() ? supported_isas()[0] : isa)
                              .summarize(logits.data(), int(logits.size()), float(std::min(1 / temperature, 1e30)));
        return nb::make_tuple(s.best, s.greatest, s.total);
      },
      "logits"_a.noconvert(), "temperature"_a, "isa"_a = "",
      "(first index of the maximum, the maximum, sum of e^((x - maximum) / temperature)); the sum is NaN if anything is NaN or +inf.");
  m.def(
      "draw",
      [](FloatArray logits, double temperature, double fraction, const std::string& isa) {
        if (!logits.size() || logits.size() > INT32_MAX) refuse("draw: a row of " + text(logits.size()));
        if (!(temperature > 0) || !(fraction >= 0 && fraction < 1)) refuse("draw: temperature must be above 0, the fraction in [0, 1)");
        const Kernels& k = kernels_named(isa.empty() ? supported_isas()[0] : isa);
        const float inverse = float(std::min(1 / temperature, 1e30));
        const Summary s = k.summarize(logits.data(), int(logits.size()), inverse);
        return k.draw(logits.data(), int(logits.size()), inverse, s.greatest, fraction * double(s.total));
      },
      "logits"_a.noconvert(), "temperature"_a, "fraction"_a, "isa"_a = "", "The id at this fraction of the softmax's cumulative sum.");
  m.def(
      "greatest_ids",
      [](FloatArray values, int count, const std::string& isa) {
        if (count < 0 || size_t(count) > values.size() || values.size() > INT32_MAX)
          refuse("greatest_ids: " + std::to_string(count) + " of " + text(values.size()));
        std::vector<int32_t> ids(size_t(count) + 1);
        ids.resize(
            count
                ? kernels_named(isa.empty() ? supported_isas()[0] : isa).greatest_ids(values.data(), int(values.size()), count, ids.data())
                : 0);
        return ids;
      },
      "values"_a.noconvert(), "count"_a, "isa"_a = "",
      "Ids of the greatest values, greatest first, the smaller id first among equals; no NaN.");

  nb::class_<Form>(m, "Form")
      .def(nb::init<const std::string&, int, int>(), "kind"_a, "outputs"_a, "inputs"_a)
      .def_ro("kind", &Form::type)
      .def_prop_ro("outputs", &Form::outputs)
      .def_prop_ro("inputs", &Form::inputs)
      .def_prop_ro("size_bytes", &Form::bytes)
      .def(
          "attach", [](Form& f, ByteArray data) { f.attach(data.data(), data.size(), nb::cast(data)); }, "data"_a,
          "Use packed bytes where they are; they must stay as they are.");

  nb::class_<Rows>(m, "Rows")
      .def(
          "__init__",
          [](Rows* self, int width) {
            if (width < 1) refuse("rows: width " + std::to_string(width) + ", at least 1 is needed");
            new (self) Rows(width);
          },
          "width"_a)
      .def_prop_ro("width", &Rows::width)
      .def_prop_ro("rows", &Rows::rows)
      .def(
          "numpy", [](nb::handle self) { return view(nb::cast<Rows&>(self), self); }, "The floats, in place.")
      .def(
          "take",
          [](Rows& out, const Rows& from, IntArray rows) {
            if (out.width() != from.width()) refuse("take: widths differ");
            for (size_t i = 0; i < rows.size(); i++)
              if (rows.data()[i] < 0 || rows.data()[i] >= from.rows())
                refuse("take: row " + std::to_string(rows.data()[i]) + " of " + std::to_string(from.rows()));
            out.resize(int(rows.size()));
            for (size_t i = 0; i < rows.size(); i++)
              std::memcpy(out.floats() + i * out.width(), from.floats() + size_t(rows.data()[i]) * from.width(), size_t(out.width()) * 4);
          },
          "source"_a, "rows"_a.noconvert(), "Copy some rows.")
      .def(
          "set",
          [](Rows& out, nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu> from) {
            if (from.shape(1) != size_t(out.width()))
              refuse("set: rows of " + std::to_string(from.shape(1)) + ", expected " + std::to_string(out.width()));
            out.resize(int(from.shape(0)));
            if (from.size()) std::memcpy(out.floats(), from.data(), from.size() * 4);
          },
          "source"_a.noconvert());

  nb::class_<KVPool>(m, "KVPool")
      .def(
          "__init__",
          [](KVPool* self, int layers, int kv_heads, int head_dim, const std::string& type) {
            KVShape shape{type == "q8" ? KVType::q8 : type == "q4" ? KVType::q4 : KVType::f16, kv_heads, head_dim};
            if (type != "f16" && type != "q8" && type != "q4") refuse("KV type " + type + ": expected f16, q8 or q4");
            if (layers < 1 || kv_heads < 1 || head_dim < 16 || head_dim % (shape.type == KVType::f16 ? 16 : 32))
              refuse("KV pool: head_dim " + std::to_string(head_dim) + " must be a multiple of 16 (f16) or 32 (q8, q4)");
            if (int64_t(kv_heads) * head_dim > 1 << 24 || layers > 1 << 20)
              refuse("KV pool: " + std::to_string(layers) + " layers of " + std::to_string(kv_heads) + " heads of " +
                     std::to_string(head_dim) + ", at most 2^20 layers of 2^24 elements");
            new (self) KVPool(layers, shape);
          },
          "layers"_a, "kv_heads"_a, "head_dim"_a, "kind"_a)
      .def_prop_ro("block_bytes", &KVPool::block_bytes)
      .def_prop_ro("in_use", &KVPool::in_use)
      .def_prop_ro("spare", &KVPool::spare)
      .def("allocate", &KVPool::allocate, "clear"_a = true)
      .def("release", &KVPool::release, "block"_a)
      .def("trim", &KVPool::trim, "keep"_a)
      .def(
          "data",
          [](nb::handle self, int id) {
            KVPool& pool = nb::cast<KVPool&>(self);
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(pool.data(id), {pool.block_bytes()}, self);
          },
          "block"_a, "The bytes of a block, in place; valid until it is released.");

  nb::class_<Batch>(m, "Batch")
      .def(nb::init<>())
      .def("add", &Batch::add, "start"_a, "count"_a, "blocks"_a)
      .def("place", &Batch::place, "pool"_a, "Find the blocks of all spans; they must be there until the batch has been computed.")
      .def("add_rotary", &Batch::add_rotary, "frequencies"_a.noconvert(), "magnitude"_a, "adjacent"_a,
           "Compute the rotary tables of all rows, for one way to rotate.")
      .def_ro("rows", &Batch::rows);

  const nb::call_guard<nb::gil_scoped_release> without_gil;
  nb::class_<Engine>(m, "Engine")
      .def(
          "__init__",
          [](Engine* self, const std::string& isa, int threads) {
            if (threads < 1 || threads > 1024) refuse("threads: " + std::to_string(threads) + ", must be between 1 and 1024");
            new (self) Engine(kernels_named(isa), threads);
          },
          "isa"_a, "threads"_a)
      .def_prop_ro("isa", [](const Engine& e) { return e.k.name; })
      .def_prop_ro(
          "spent",
          [](const Engine& e) {
            nb::dict d;
            d["products"] = e.spent[products_s], d["attention"] = e.spent[attention_s], d["other"] = e.spent[other_s];
            return d;
          },
          "Seconds that kernels took, by kind, since the engine was made.")
      .def_prop_ro("threads", [](const Engine& e) { return e.pool.threads(); })
      .def(
          "pack",
          [](Engine& e, const Form& form, ByteArray blocks, OutBytes out) {
            const size_t row = form.quantised ? block_row_bytes(form.type, form.inputs()) : form.inputs() * form.floats.element();
            if (blocks.size() != row * form.outputs())
              refuse("pack " + form.type + ": " + text(blocks.size()) + " bytes, expected " + text(row * form.outputs()));
            if (out.size() != form.bytes())
              refuse("pack " + form.type + ": room for " + text(out.size()) + " bytes, needed " + text(form.bytes()));
            nb::gil_scoped_release release;
            if (form.quantised)
              pack(form.type, blocks.data(), form.weight, out.data(), e.pool);
            else
              pack_floats(form.floats.type, blocks.data(), form.floats, out.data(), e.pool);
          },
          "form"_a, "blocks"_a.noconvert(), "out"_a.noconvert(), "The blocks of a GGUF tensor into a form's memory.")
      .def(
          "integer_peak",
          [](Engine& e) {
            nb::gil_scoped_release release;
            return e.k.integer_peak(e.pool);
          },
          "Integer operations per second that this machine can do with this instruction set.")
      .def(
          "read_bandwidth",
          [](Engine& e, ByteArray memory) {
            nb::gil_scoped_release release;
            return e.k.read_bandwidth(e.pool, memory.data(), memory.size());
          },
          "memory"_a.noconvert(), "Bytes per second, read from this memory.")
      .def("embed", &Engine::embed, "table"_a, "tokens"_a.noconvert(), "out"_a, without_gil)
      .def("norm", &Engine::norm, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "out"_a, "quantise"_a, without_gil)
      .def("quantise", &Engine::quantise, "x"_a, without_gil)
      .def("linear", &Engine::linear, "x"_a, "forms"_a, "biases"_a, "outs"_a, "add"_a, without_gil)
      .def("gated", &Engine::gated, "x"_a, "gate_up"_a, "biases"_a, "out"_a, "spare"_a, "activation"_a, without_gil)
      .def("norm_heads", &Engine::norm_heads, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "heads"_a, without_gil)
      .def("rotate", &Engine::rotate, "x"_a, "heads"_a, "batch"_a, "rope"_a, without_gil)
      .def("store_kv", &Engine::store_kv, "pool"_a, "layer"_a, "keys"_a, "values"_a, "batch"_a, without_gil)
      .def("attention", &Engine::attention, "pool"_a, "layer"_a, "q"_a, "batch"_a, "scale"_a, "window"_a, "softcap"_a, "out"_a, without_gil)
      .def(
          "run",
          [](Engine& e, const Tape& tape, Batch& batch) {
            for (const auto& operation : tape.operations) operation(e, batch);
          },
          "tape"_a, "batch"_a, without_gil, "Do what was recorded, over this batch.");

  nb::class_<Tape>(m, "Tape")
      .def(nb::init<>())
      .def("norm", &Tape::norm, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "out"_a, "quantise"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 5>())
      .def("linear", &Tape::linear, "x"_a, "forms"_a, "biases"_a, "outs"_a, "add"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 5>())
      .def("gated", &Tape::gated, "x"_a, "gate_up"_a, "biases"_a, "out"_a, "spare"_a, "activation"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 5>(), nb::keep_alive<1, 6>())
      .def("norm_heads", &Tape::norm_heads, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "heads"_a, nb::keep_alive<1, 2>())
      .def("rotate", &Tape::rotate, "x"_a, "heads"_a, "batch"_a, "rope"_a, nb::keep_alive<1, 2>())
      .def("store_kv", &Tape::store_kv, "pool"_a, "layer"_a, "keys"_a, "values"_a, "batch"_a, nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("attention", &Tape::attention, "pool"_a, "layer"_a, "q"_a, "batch"_a, "scale"_a, "window"_a, "softcap"_a, "out"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 9>());
}

// The Python face of the native core. Arguments are checked before any kernel sees them; the GIL is released meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "arguments.h"
#include "cpu.h"
#include "engine.h"
#include "suffixes.h"
#include "tape.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace everwarm {
namespace {

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
  nb::dict types;
  for (const TensorType& type : tensor_types()) types[type.name] = nb::make_tuple(type.block_inputs, type.block_bytes);
  m.attr("TENSOR_TYPES") = types;

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
  m.def(
      "forbid",
      [](nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu> logits,
         nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> allowed, const std::string& isa) {
        if (logits.size() > INT32_MAX || allowed.size() < (logits.size() + 31) / 32)
          refuse("forbid: " + text(allowed.size()) + " words of bits for " + text(logits.size()) + " logits");
        return kernels_named(isa.empty() ? supported_isas()[0] : isa).forbid(logits.data(), int(logits.size()), allowed.data());
      },
      "logits"_a.noconvert(), "allowed"_a.noconvert(), "isa"_a = "",
      "Set logits[i] to -infinity unless bit i % 32 of allowed[i / 32] is set. How many are allowed.");

  nb::class_<Suffixes>(m, "Suffixes")
      .def(nb::init<size_t>(), "most_tokens"_a)
      .def_prop_ro("tokens", &Suffixes::tokens)
      .def_prop_ro("size_bytes", &Suffixes::size_bytes)
      .def_prop_ro_static("bytes_per_token", [](nb::handle) { return Suffixes::bytes_per_token(); })
      .def("append", &Suffixes::append, "token"_a)
      .def(
          "extend",
          [](Suffixes& s, IntArray tokens) {
            for (size_t i = 0; i < tokens.size(); i++) s.append(tokens.data()[i]);
          },
          "tokens"_a.noconvert(), nb::call_guard<nb::gil_scoped_release>(), "Store tokens; nobody else may use the index meanwhile.")
      .def(
          "absorb",
          [](Suffixes& s, IntArray tokens, size_t begin, size_t end) {
            if (begin > end || end > tokens.size())
              refuse("absorb: " + text(begin) + " to " + text(end) + " of " + text(tokens.size()) + " tokens");
            s.absorb(tokens.data(), begin, end);
          },
          "tokens"_a.noconvert(), "begin"_a, "end"_a, "Store what of tokens[begin:end] is not there yet.")
      .def(
          "draft",
          [](const Suffixes& s, const std::vector<int>& tail, int most) {
            auto found = s.draft(tail, most);
            return std::make_tuple(found.match, std::move(found.tokens), std::move(found.support));
          },
          "tail"_a, "most"_a, "How long the longest match is, what has followed it, and how sure each token of that is.");

  nb::class_<Form>(m, "Form")
      .def(nb::init<const std::string&, int, int>(), "kind"_a, "outputs"_a, "inputs"_a)
      .def_prop_ro("kind", [](const Form& f) { return f.type->name; })
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

  nb::class_<Routing>(m, "Routing")
      .def(
          "__init__",
          [](Routing* self, int experts, int used, int gating, bool normalised, float scale, int groups, int groups_used) {
            if (experts < 1 || experts > 1 << 16 || used < 1 || used > experts || groups < 1 || groups_used < 1 || groups_used > groups ||
                experts % groups || used > experts / groups * groups_used || gating < 0 || gating > 2)
              refuse("routing: " + std::to_string(used) + " of " + std::to_string(experts) + " experts, " + std::to_string(groups_used) +
                     " of " + std::to_string(groups) + " groups");
            new (self) Routing({experts, used, Gating(gating), normalised, scale, groups, groups_used});
          },
          "experts"_a, "used"_a, "gating"_a, "normalised"_a, "scale"_a, "groups"_a, "groups_used"_a)
      .def_ro("rows", &Routing::rows)
      .def_prop_ro("chosen", [](const Routing& r) { return r.chosen; })
      .def_prop_ro("weights", [](const Routing& r) { return r.weights; });

  nb::class_<KVPool>(m, "KVPool")
      .def(
          "__init__",
          [](KVPool* self, const std::vector<std::tuple<int, int, int, bool>>& layers, const std::string& type) {
            if (type != "f16" && type != "q8" && type != "q4") refuse("KV type " + type + ": expected f16, q8 or q4");
            if (layers.empty() || layers.size() > 1 << 20) refuse("KV pool: " + text(layers.size()) + " layers, 1 to 2^20 are possible");
            const KVType kind = type == "q8" ? KVType::q8 : type == "q4" ? KVType::q4 : KVType::f16;
            const int unit = kind == KVType::f16 ? 16 : 32;
            std::vector<KVShape> shapes;
            for (const auto& [kv_heads, key_dim, value_dim, latent] : layers) {
              if (kv_heads < 1 || key_dim < unit || key_dim % unit || value_dim < unit || value_dim % unit ||
                  (latent && value_dim > key_dim))
                refuse("KV pool: " + std::to_string(kv_heads) + " heads of " + std::to_string(key_dim) + " and " +
                       std::to_string(value_dim) + ", must be multiples of 16 (f16) or 32 (q8, q4)");
              if (int64_t(kv_heads) * (key_dim > value_dim ? key_dim : value_dim) > 1 << 24)
                refuse("KV pool: " + std::to_string(kv_heads) + " heads of " + std::to_string(key_dim) + ", at most 2^24 elements");
              shapes.push_back({kind, kv_heads, key_dim, value_dim, latent});
            }
            new (self) KVPool(std::move(shapes));
          },
          "layers"_a, "kind"_a, "Layers as (KV heads, elements of a key, of a value, whether values are the beginnings of keys).")
      .def(
          "__init__",
          [](KVPool* self, size_t bytes) {
            if (bytes < 1 || bytes > size_t(1) << 40) refuse("KV pool: blocks of " + text(bytes) + " bytes, 1 to 2^40 are possible");
            new (self) KVPool(bytes);
          },
          "bytes"_a, "Blocks of so many bytes: states.")
      .def_prop_ro("block_bytes", &KVPool::block_bytes)
      .def_prop_ro("layer_bytes", &KVPool::layer_bytes)
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
      .def("add", &Batch::add, "start"_a, "count"_a, "blocks"_a, "windows"_a = std::vector<int>{}, "state"_a = -1)
      .def("place", &Batch::place, "pool"_a, "Find the blocks of all spans; they must be there until the batch has been computed.")
      .def("place_windows", &Batch::place_windows, "pool"_a, "reach"_a,
           "The same for layers that see at most `reach` tokens back: older blocks may be gone (-1).")
      .def("place_states", &Batch::place_states, "pool"_a, "Find the states of all spans.")
      .def("add_rotary", &Batch::add_rotary, "frequencies"_a.noconvert(), "magnitude"_a, "adjacent"_a, "sharpen_every"_a = 0,
           "sharpen"_a = 0.0, "Compute the rotary tables of all rows, for one way to rotate.")
      .def_ro("rows", &Batch::rows);

  const nb::call_guard<nb::gil_scoped_release> without_gil;
  nb::class_<Engine> engine(m, "Engine");
  nb::class_<Tape> tape(m, "Tape");
  engine
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
            const std::string what = std::string("pack ") + form.type->name;
            const size_t size = form.type->row_bytes(form.inputs()) * form.outputs();
            if (blocks.size() != size) refuse(what + ": " + text(blocks.size()) + " bytes, expected " + text(size));
            if (out.size() != form.bytes()) refuse(what + ": room for " + text(out.size()) + " bytes, needed " + text(form.bytes()));
            nb::gil_scoped_release release;
            if (form.quantised())
              pack(*form.type, blocks.data(), form.weight, out.data(), e.pool);
            else
              pack_floats(blocks.data(), form.floats, out.data(), e.pool);
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
      .def("quantise", &Engine::quantise, "x"_a, without_gil)
      .def(
          "run", [](Engine& e, const Tape& tape, Batch& batch) { tape.run(e, batch); }, "tape"_a, "batch"_a, without_gil,
          "Do what was recorded, over this batch.");
  tape.def(nb::init<>());

  // Each operation once: the engine does it, the tape remembers it.
  const auto operation = [&](const char* name, auto method, const auto&... arguments) {
    engine.def(name, method, arguments..., without_gil);
    tape.def(name, recording(method), arguments...);
  };
  operation("norm", &Engine::norm, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "out"_a, "quantise"_a);
  operation("linear", &Engine::linear, "x"_a, "forms"_a, "biases"_a, "outs"_a, "add"_a);
  operation("gated", &Engine::gated, "x"_a, "gate_up"_a, "biases"_a, "out"_a, "spare"_a, "activation"_a);
  operation("add", &Engine::add, "x"_a, "y"_a, "scale"_a);
  operation("route", &Engine::route, "x"_a, "router"_a, "bias"_a.none(), "selection_bias"_a.none(), "expert_scales"_a.none(), "scores"_a,
            "out"_a);
  operation("gate", &Engine::gate, "x"_a, "up"_a, "activation"_a);
  operation("scale", &Engine::scale, "x"_a, "factor"_a, "softcap"_a);
  operation("experts", &Engine::experts, "x"_a, "routing"_a, "gates"_a, "ups"_a, "downs"_a, "gate_biases"_a, "up_biases"_a, "down_biases"_a,
            "activation"_a, "work"_a, "out"_a);
  operation("weigh", &Engine::weigh, "x"_a, "h"_a, "by"_a.noconvert());
  operation("norm_heads", &Engine::norm_heads, "x"_a, "weight"_a.noconvert(), "epsilon"_a, "heads"_a);
  operation("rotate", &Engine::rotate, "x"_a, "heads"_a, "batch"_a, "rope"_a, "offset"_a = 0);
  operation("by_head", &Engine::by_head, "x"_a, "offset"_a, "forms"_a, "work"_a, "out"_a, "out_offset"_a);
  operation("short_conv", &Engine::short_conv, "states"_a, "place"_a, "x"_a, "weight"_a.noconvert(), "bias"_a.noconvert().none(), "silu"_a,
            "batch"_a, "out"_a);
  operation("delta_net", &Engine::delta_net, "states"_a, "place"_a, "shape"_a, "interleaved"_a, "alternating"_a, "qkv"_a, "beta"_a,
            "alpha"_a, "a"_a.noconvert(), "bias"_a.noconvert(), "batch"_a, "scratch"_a, "out"_a);
  operation("mamba", &Engine::mamba, "states"_a, "place"_a, "shape"_a, "xbc"_a, "dt"_a, "a"_a.noconvert(), "bias"_a.noconvert(),
            "skip"_a.noconvert(), "batch"_a, "scratch"_a, "out"_a);
  operation("copy_heads", &Engine::copy_heads, "x"_a, "heads"_a, "offset"_a, "width"_a, "out"_a, "out_offset"_a);
  operation("store_kv", &Engine::store_kv, "pool"_a, "layer"_a, "keys"_a, "values"_a.none(), "batch"_a);
  operation("attention", &Engine::attention, "pool"_a, "layer"_a, "q"_a, "batch"_a, "scale"_a, "window"_a, "softcap"_a, "out"_a,
            "sinks"_a = nb::none());
}

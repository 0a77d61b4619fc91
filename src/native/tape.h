// Operations of a step that are remembered, to be done again over other batches without asking Python.
//
// `recording(&Engine::norm)` makes a function that takes what `Engine::norm` takes and, instead of doing it, remembers it. Rows, forms
// and KV pools are referred to, and their Python objects are kept alive. Other arguments are copied; a copied array holds the memory of
// the original. The batch is not kept: the operation is done over the batch of each run.
#pragma once
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine.h"

namespace everwarm {

// How an argument is kept until an operation runs.
template <class T>
struct Kept {
  T value;
  const T& get(Batch&) const { return value; }
};

template <class T>
struct KeptReference {
  T* value;
  T& get(Batch&) const { return *value; }
};

struct BatchOfTheRun {
  Batch& get(Batch& batch) const { return batch; }
};

template <class T, class... Types>
constexpr bool is_one_of = (std::is_same_v<T, Types> || ...);
template <class T>
constexpr bool is_referred_to = is_one_of<T, Rows, Form, KVPool, Routing>;
template <class T>
constexpr bool is_copied =
    std::is_arithmetic_v<T> || is_one_of<T, std::string, std::vector<int>, FloatArray, std::optional<FloatArray>, IntArray, Biases>;

class Tape {
 public:
  template <class... Arguments>
  void record(void (Engine::*operation)(Arguments...), Arguments... arguments) {
    (keep_alive(arguments), ...);
    operations_.push_back([operation, kept = std::make_tuple(keep<Arguments>(arguments)...)](Engine& engine, Batch& batch) {
      std::apply([&](const auto&... each) { (engine.*operation)(each.get(batch)...); }, kept);
    });
  }
  void run(Engine& engine, Batch& batch) const {
    for (const auto& operation : operations_) operation(engine, batch);
  }

 private:
  template <class Argument>
  static auto keep(Argument& argument) {
    using T = std::remove_reference_t<Argument>;  // still const, if it is
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, Batch>)
      return BatchOfTheRun{};
    else if constexpr (is_referred_to<Plain>)
      return KeptReference<T>{&argument};
    else
      return Kept<Plain>{argument};
  }

  template <class T>
  void keep_alive(const T& argument) {
    static_assert(is_referred_to<T> || is_copied<T> || std::is_same_v<T, Batch>, "say above how an argument of this type is kept");
    if constexpr (is_referred_to<T>) objects_.push_back(nb::find(argument));
  }
  template <class T>
  void keep_alive(T* const& argument) {
    if (argument) objects_.push_back(nb::find(argument));
  }
  template <class T>
  void keep_alive(const std::vector<T*>& arguments) {
    for (const T* argument : arguments)
      if (argument) objects_.push_back(nb::find(argument));
  }

  std::vector<std::function<void(Engine&, Batch&)>> operations_;
  std::vector<nb::object> objects_;
};

template <class... Arguments>
auto recording(void (Engine::*operation)(Arguments...)) {
  return [operation](Tape& tape, Arguments... arguments) { tape.record<Arguments...>(operation, arguments...); };
}

}  // namespace everwarm

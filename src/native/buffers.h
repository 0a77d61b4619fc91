// Memory that kernels work on: activations that are reused from step to step, and the blocks of the KV pool.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace everwarm {

// Aligned memory that only grows. What it held is lost when it does.
class Bytes64 {
  static constexpr size_t HUGE = 2 << 20;

 public:
  uint8_t* reserve(size_t size) {
    if (size > size_) {
      // Large memory on huge pages, where the system gives them: a walk through it then misses the TLB 500 times less often.
      const size_t alignment = size >= HUGE / 2 ? HUGE : 64;
      data_.reset(static_cast<uint8_t*>(std::aligned_alloc(alignment, round_up(size, alignment))));
      if (!data_) throw std::bad_alloc();
      if (alignment == HUGE) madvise(data_.get(), round_up(size, alignment), MADV_HUGEPAGE);
      size_ = size;
    }
    return data_.get();
  }
  uint8_t* get() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t[], Free> data_;
  size_t size_ = 0;
};

// Rows of activations: as floats, as codes, or both.
class Rows {
 public:
  explicit Rows(int width) : width_(width) {}
  Rows(const Rows&) = delete;

  int width() const { return width_; }
  int rows() const { return rows_; }
  bool quantised() const { return quantised_; }
  void resize(int rows) { rows_ = rows, quantised_ = false, floats_.reserve(size_t(rows) * width_ * 4); }
  float* floats() const { return reinterpret_cast<float*>(floats_.get()); }
  void floats_changed() { quantised_ = false; }  // in place: codes of the old floats no longer hold

  // Some rows of others, in their order: codes, and floats where they are asked for or there are no codes.
  void gather(const Rows& from, const int* rows, int count, bool with_floats, Pool& pool) {
    resize(count);
    const size_t groups = width_ / GROUP;
    const bool floats_too = with_floats || !from.quantised(), codes_too = from.quantised();
    const QuantOut out = codes_too ? quant_out() : QuantOut{};
    const QuantRows in = codes_too ? from.quant() : QuantRows{};
    constexpr int STEP = 16;
    pool.run((count + STEP - 1) / STEP, [&](int chunk, int) {
      for (int i = chunk * STEP; i < count && i < (chunk + 1) * STEP; i++) {
        if (floats_too) std::memcpy(floats() + size_t(i) * width_, from.floats() + size_t(rows[i]) * width_, size_t(width_) * 4);
        if (!codes_too) continue;
        const size_t to = size_t(i) * groups, at = size_t(rows[i]) * groups;
        std::memcpy(out.codes + to * GROUP, in.codes + at * GROUP, groups * GROUP);
        std::memcpy(out.scale + to, in.scale + at, groups * 4);
        std::memcpy(out.scaled_sum + to, in.scaled_sum + at, groups * 4);
        std::memcpy(out.sums + 2 * to, in.sums + 2 * at, groups * 8);
        std::memcpy(out.outlier + to, in.outlier + at, groups * 4);
        std::memcpy(out.outlier_at + to, in.outlier_at + at, groups * 4);
      }
    });
  }

  QuantOut quant_out() {
    const size_t groups = size_t(rows_) * (width_ / GROUP);
    quantised_ = true;
    return {width_,
            reinterpret_cast<int8_t*>(codes_.reserve(size_t(rows_) * width_)),
            reinterpret_cast<float*>(scale_.reserve(groups * 4)),
            reinterpret_cast<float*>(scaled_sum_.reserve(groups * 4)),
            reinterpret_cast<float*>(scaled_halves_.reserve(groups * 8)),
            reinterpret_cast<int32_t*>(sums_.reserve(groups * 8)),
            reinterpret_cast<float*>(outlier_.reserve(groups * 4)),
            reinterpret_cast<int32_t*>(outlier_at_.reserve(groups * 4))};
  }
  QuantRows quant() const {
    return {rows_,
            width_,
            reinterpret_cast<int8_t*>(codes_.get()),
            reinterpret_cast<float*>(scale_.get()),
            reinterpret_cast<float*>(scaled_sum_.get()),
            reinterpret_cast<float*>(scaled_halves_.get()),
            reinterpret_cast<int32_t*>(sums_.get()),
            reinterpret_cast<float*>(outlier_.get()),
            reinterpret_cast<int32_t*>(outlier_at_.get())};
  }

 private:
  int width_, rows_ = 0;
  bool quantised_ = false;
  Bytes64 floats_, codes_, scale_, scaled_sum_, scaled_halves_, sums_, outlier_, outlier_at_;
};

// Which experts each row takes, the best first, and how much each counts.
struct Routing {
  const RouteShape shape;
  int rows = 0;
  std::vector<int32_t> chosen;  // (rows, used)
  std::vector<float> weights;   // (rows, used)

  explicit Routing(const RouteShape& s) : shape(s) {}
  Routing(const Routing&) = delete;
  void resize(int count) { rows = count, chosen.resize(size_t(count) * shape.used), weights.resize(size_t(count) * shape.used); }
};

// Blocks of keys and values: one contiguous buffer each, all layers, addressed by a handle.
//
// Blocks lie side by side in chunks on huge pages: filling 94 MB takes 14 ms there, 50 ms on small pages, 8 ms where memory is used again.
// So a released block keeps its memory for the next one until `trim` gives it back.
class KVPool {
  static constexpr size_t PAGE = 4096, HUGE = 2 << 20, CHUNK = 32 << 20;
  enum class State : uint8_t { empty, spare, live };  // without memory; released, with memory; in use

 public:
  explicit KVPool(std::vector<KVShape> shapes) : shapes_(std::move(shapes)) {
    for (const KVShape& shape : shapes_) offsets_.push_back(block_bytes_), block_bytes_ += kv_layer_bytes(shape);
    stride_ = round_up(block_bytes_, PAGE), per_chunk_ = std::max<size_t>(1, CHUNK / stride_);
  }
  explicit KVPool(size_t bytes) : block_bytes_(bytes) {
    stride_ = round_up(block_bytes_, PAGE), per_chunk_ = std::max<size_t>(1, CHUNK / stride_);
  }
  KVPool(const KVPool&) = delete;
  ~KVPool() {
    for (uint8_t* chunk : chunks_) munmap(chunk, chunk_bytes());
  }

  // Of one layer; and where its part of a block begins.
  const KVShape& shape(int layer) const { return shapes_[checked(layer)]; }
  size_t offset(int layer) const { return offsets_[checked(layer)]; }
  size_t block_bytes() const { return block_bytes_; }
  std::vector<size_t> layer_bytes() const {
    std::vector<size_t> sizes;
    for (const KVShape& shape : shapes_) sizes.push_back(kv_layer_bytes(shape));
    return sizes;
  }
  size_t in_use() const { return live_; }
  size_t spare() const { return spare_.size(); }

  // A vector may read past the newest token and must find numbers there: `clear` a block unless all of it is written at once.
  int allocate(bool clear) {
    int id;
    if (!spare_.empty()) {
      id = spare_.back();
      spare_.pop_back();
      if (clear) std::memset(at(id), 0, block_bytes());
    } else {
      if (empty_.empty()) grow();
      id = *empty_.begin();
      empty_.erase(empty_.begin());
    }
    state_[id] = State::live, ++live_;
    return id;
  }
  void release(int id) {
    check(id);
    state_[id] = State::spare, --live_;
    spare_.push_back(id);
  }
  // Give back the memory of all but `keep` released blocks, in runs as long as possible: a huge page is freed as a whole or not at all.
  void trim(size_t keep) {
    if (spare_.size() <= keep) return;
    std::sort(spare_.begin(), spare_.end());
    size_t low = keep;
    while (low < spare_.size()) {
      size_t high = low + 1;
      while (high < spare_.size() && spare_[high] == spare_[high - 1] + 1 && size_t(spare_[high]) % per_chunk_) ++high;
      madvise(at(spare_[low]), (high - low) * stride_, MADV_DONTNEED);
      for (size_t i = low; i < high; ++i) state_[spare_[i]] = State::empty, empty_.insert(spare_[i]);
      low = high;
    }
    spare_.resize(keep);
  }
  uint8_t* data(int id) const {
    check(id);
    return at(id);
  }

 private:
  size_t chunk_bytes() const { return round_up(per_chunk_ * stride_, HUGE); }
  uint8_t* at(int id) const { return chunks_[size_t(id) / per_chunk_] + size_t(id) % per_chunk_ * stride_; }
  void grow() {
    const size_t size = chunk_bytes() + HUGE;
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    uint8_t* begin = static_cast<uint8_t*>(mapped);
    uint8_t* chunk = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(begin), HUGE));
    if (chunk > begin) munmap(begin, chunk - begin);
    munmap(chunk + chunk_bytes(), begin + size - (chunk + chunk_bytes()));
    madvise(chunk, chunk_bytes(), MADV_HUGEPAGE);
    chunks_.push_back(chunk);
    for (size_t i = 0; i < per_chunk_; ++i) empty_.insert(empty_.end(), int(state_.size())), state_.push_back(State::empty);
  }
  void check(int id) const {
    if (id < 0 || size_t(id) >= state_.size() || state_[id] != State::live)
      throw std::out_of_range("KV block " + std::to_string(id) + " is not allocated");
  }
  size_t checked(int layer) const {
    if (layer < 0 || size_t(layer) >= shapes_.size())
      throw std::out_of_range("layer " + std::to_string(layer) + " of " + std::to_string(shapes_.size()));
    return size_t(layer);
  }
  std::vector<KVShape> shapes_;
  std::vector<size_t> offsets_;
  size_t block_bytes_ = 0, stride_, per_chunk_, live_ = 0;
  std::vector<uint8_t*> chunks_;
  std::vector<State> state_;
  std::vector<int> spare_;  // the latest released last: its memory is the likeliest to be in a cache
  std::set<int> empty_;     // the lowest first, so that chunks fill up one after the other
};

}  // namespace everwarm

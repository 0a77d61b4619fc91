// Memory that kernels work on: activations that are reused from step to step, and the blocks of the KV pool.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
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

  QuantOut quant_out() {
    const size_t groups = size_t(rows_) * (width_ / GROUP);
    quantised_ = true;
    return {width_, reinterpret_cast<int8_t*>(codes_.reserve(size_t(rows_) * width_)), reinterpret_cast<float*>(scale_.reserve(groups * 4)),
            reinterpret_cast<float*>(scaled_sum_.reserve(groups * 4)), reinterpret_cast<int32_t*>(sums_.reserve(groups * 8)),
            reinterpret_cast<float*>(outlier_.reserve(groups * 4)), reinterpret_cast<int32_t*>(outlier_at_.reserve(groups * 4))};
  }
  QuantRows quant() const {
    return {rows_, width_, reinterpret_cast<int8_t*>(codes_.get()), reinterpret_cast<float*>(scale_.get()),
            reinterpret_cast<float*>(scaled_sum_.get()), reinterpret_cast<int32_t*>(sums_.get()),
            reinterpret_cast<float*>(outlier_.get()), reinterpret_cast<int32_t*>(outlier_at_.get())};
  }

 private:
  int width_, rows_ = 0;
  bool quantised_ = false;
  Bytes64 floats_, codes_, scale_, scaled_sum_, sums_, outlier_, outlier_at_;
};

// Blocks of keys and values: one contiguous buffer each, all layers, addressed by a handle.
class KVPool {
 public:
  KVPool(int layers, KVShape shape) : layers_(layers), shape_(shape) {}
  KVPool(const KVPool&) = delete;

  const KVShape& shape() const { return shape_; }
  int layers() const { return layers_; }
  size_t block_bytes() const { return layers_ * kv_layer_bytes(shape_); }
  size_t in_use() const { return blocks_.size() - free_.size(); }

  int allocate() {
    if (free_.empty()) {
      blocks_.emplace_back(std::make_unique<Bytes64>());
      live_.push_back(false);
      free_.push_back(int(blocks_.size()) - 1);
    }
    const int id = free_.back();
    uint8_t* data = blocks_[id]->reserve(block_bytes());
    std::memset(data, 0, block_bytes());  // a vector may read past the newest token: it must find numbers there
    free_.pop_back();
    live_[id] = true;
    return id;
  }
  void release(int id) {
    check(id);
    live_[id] = false;
    blocks_[id] = std::make_unique<Bytes64>();  // memory goes back at once
    free_.push_back(id);
  }
  uint8_t* data(int id) const {
    check(id);
    return blocks_[id]->get();
  }

 private:
  void check(int id) const {
    if (id < 0 || size_t(id) >= blocks_.size() || !live_[id]) throw std::out_of_range("KV block " + std::to_string(id) + " is not allocated");
  }
  int layers_;
  KVShape shape_;
  std::vector<std::unique_ptr<Bytes64>> blocks_;
  std::vector<bool> live_;
  std::vector<int> free_;
};

}  // namespace everwarm

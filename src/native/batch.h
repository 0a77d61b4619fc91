// The rows of one step: whose they are, where their keys and values lie, and how they are rotated.
#pragma once
#include <string>
#include <vector>

#include "arguments.h"
#include "buffers.h"
#include "rope.h"

namespace everwarm {

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

}  // namespace everwarm

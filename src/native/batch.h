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
  void add_rotary(FloatArray frequencies, double magnitude, bool adjacent, int sharpen_every, double sharpen) {
    const int pairs = int(frequencies.size());
    if (sharpen_every < 0) refuse("rotary: sharpened every " + std::to_string(sharpen_every) + " positions, at least 1 is needed, or 0");
    rotaries.push_back({adjacent, pairs, std::vector<float>(size_t(rows) * pairs), std::vector<float>(size_t(rows) * pairs)});
    auto& [_, __, cosine, sine] = rotaries.back();
    for (const Span& span : spans)
      for (int r = 0; r < span.count; r++) {
        const double steps = sharpen_every ? double((span.start + r) / sharpen_every) : 0.0;
        const double scale = steps > 0.0 ? magnitude * (1.0 + sharpen * natural_logarithm(1.0 + steps)) : magnitude;
        for (int i = 0; i < pairs; i++) {
          const float angle = float(span.start + r) * frequencies.data()[i];
          double s, c;
          sine_cosine(angle, s, c);
          const size_t at = size_t(span.first + r) * pairs + i;
          sine[at] = float(s * scale), cosine[at] = float(c * scale);
        }
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
    const size_t offset = pool.offset(layer);
    pointers.clear(), layer_spans.clear();
    pointers.reserve(bases.size());
    for (uint8_t* base : bases) pointers.push_back(base + offset);
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

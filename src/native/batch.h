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
    std::vector<int> windows;  // blocks of layers that see only the last tokens; -1: long out of sight, and gone
    int state;                 // of layers with a state; -1: there are none
  };
  std::vector<Span> spans;
  // Blocks of one pool: where those of all spans are, one after the other.
  struct Place {
    const KVPool* pool = nullptr;
    int reach = 0;  // of windows: so many tokens back, the own one included, are there
    std::vector<uint8_t*> bases;
  };
  // Cosine and sine of every row and pair; layers may rotate in different ways.
  struct Rotary {
    bool adjacent;
    int pairs;
    std::vector<float> cosine, sine;
  };
  int rows = 0;
  std::vector<Rotary> rotaries;
  Place full, window;
  const KVPool* state_pool = nullptr;
  std::vector<StateRows> states, layer_states;
  std::vector<uint8_t*> pointers;  // scratch of a call
  std::vector<SpanRows> layer_spans;

  void add(int start, int count, std::vector<int> blocks, std::vector<int> windows, int state) {
    if (start < 0 || count < 0)
      refuse("span: start " + std::to_string(start) + ", count " + std::to_string(count) + ", neither may be negative");
    if (blocks.size() * BLOCK < size_t(start) + count)
      refuse("span: " + text(blocks.size()) + " blocks can't hold " + text(size_t(start) + count) + " tokens");
    if (!windows.empty() && windows.size() != blocks.size())
      refuse("span: " + text(windows.size()) + " blocks of windows, expected " + text(blocks.size()));
    spans.push_back({rows, count, start, std::move(blocks), std::move(windows), state});
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
  void place(const KVPool& pool) { find(pool, 0, full, &Span::blocks); }
  void place_windows(const KVPool& pool, int reach) {
    if (reach < 1) refuse("windows: a reach of " + std::to_string(reach) + " tokens, at least 1 is needed");
    find(pool, reach, window, &Span::windows);
  }
  void place_states(const KVPool& pool) {
    state_pool = &pool, states.clear();
    for (const Span& span : spans) states.push_back({span.first, span.count, reinterpret_cast<float*>(pool.data(span.state))});
  }
  // Where a layer's part of every state is: `size` floats from `place` on.
  const std::vector<StateRows>& states_at(const KVPool& pool, int place, size_t size) {
    if (&pool != state_pool) refuse("batch: its states have no place yet");
    if (place < 0 || (size_t(place) + size) * 4 > pool.block_bytes()) refuse("batch: a state of " + text(size) + " numbers is too large");
    layer_states = states;
    for (StateRows& rows : layer_states) rows.state += place;
    return layer_states;
  }
  // Where this layer's part of every block is.
  const std::vector<SpanRows>& at_layer(const KVPool& pool, int layer) {
    const Place& place = place_of(pool);
    const size_t offset = pool.offset(layer);
    pointers.clear(), layer_spans.clear();
    pointers.reserve(place.bases.size());
    for (uint8_t* base : place.bases) pointers.push_back(base ? base + offset : nullptr);
    size_t from = 0;
    for (const Span& span : spans) {
      if (from + span.blocks.size() > pointers.size()) refuse("batch: its blocks have no place yet");
      layer_spans.push_back({span.first, span.count, span.start, pointers.data() + from});
      from += span.blocks.size();
    }
    return layer_spans;
  }
  // Layers in a pool of windows must not look further back than what is there.
  void check_window(const KVPool& pool, int tokens) const {
    const int reach = place_of(pool).reach;
    if (reach && (tokens < 1 || tokens > reach))
      refuse("attention: a window of " + std::to_string(tokens) + " tokens, " + std::to_string(reach) + " are kept");
  }

 private:
  const Place& place_of(const KVPool& pool) const { return &pool == window.pool ? window : full; }
  void find(const KVPool& pool, int reach, Place& place, std::vector<int> Span::* which) {
    place.pool = &pool, place.reach = reach, place.bases.clear();
    for (const Span& span : spans) {
      const std::vector<int>& ids = span.*which;
      if (ids.size() != span.blocks.size()) refuse("batch: a span without blocks in this pool");
      const int first = reach && span.start + 1 > reach ? (span.start + 1 - reach) / BLOCK : 0;  // that a row sees
      for (size_t i = 0; i < ids.size(); i++) place.bases.push_back(int(i) < first && ids[i] < 0 ? nullptr : pool.data(ids[i]));
    }
  }
};

}  // namespace everwarm

// Tokens that were seen lately, and what followed each run of them: drafts of what comes next are read from here.
//
// The tokens lie in a ring; when it is full, the oldest are forgotten. For runs of four lengths there is a table of
// chains: a bucket has the latest place where such a run ended, every place has the one before it with the same bucket.
// A bucket may mix runs, so tokens are always compared. The longest run that ends like a text is found in the chain of
// the longest length that has any: exactly, unless that chain is longer than a walk.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "arguments.h"

namespace everwarm {

class Suffixes {
 public:
  static constexpr int LENGTHS[] = {2, 4, 8, 16};  // of runs that have chains
  static constexpr int LEVELS = 4;
  static constexpr int LONGEST = 64;  // longer matches count as this long
  static constexpr int WALK = 64;     // places of a chain that are looked at
  static constexpr int SAME = 64;     // tokens that are there already, at least so many in a row, are not stored again
  static constexpr int CONTEXT = 16;  // tokens before new ones that are stored with them
  static constexpr int SEPARATOR = -1;

  // How sure the next token of a draft is: one place says so, several and all of them, at least half of them, fewer.
  enum Support { ONE, ALL, HALF, FEW };

  struct Draft {
    int match = 0;  // tokens before it that are the same
    std::vector<int> tokens, support;
  };

  explicit Suffixes(size_t most_tokens) : most_(size_t(1) << bits_of(most_tokens)) { resize(std::min<size_t>(most_, 1024)); }

  size_t tokens() const { return std::min<uint64_t>(last_, capacity_); }
  size_t capacity() const { return capacity_; }
  static constexpr size_t bytes_per_token() { return 4 + LEVELS * 8; }
  size_t size_bytes() const { return capacity_ * bytes_per_token(); }

  void append(int token) {
    if (last_ >= capacity_ && capacity_ < most_) grow();
    const uint32_t at = uint32_t(++last_);
    ring_[at & mask_] = token;
    run_ = token == SEPARATOR ? 0 : std::min(run_ + 1, LONGEST);
    uint64_t hash = 0;
    for (int level = 0, seen = 0; level < LEVELS && run_ >= LENGTHS[level]; level++) {
      for (; seen < LENGTHS[level]; seen++) hash = mixed(hash, ring_[(at - seen) & mask_]);
      uint32_t& head = heads_[level][bucket(hash)];
      before_[level][at & mask_] = head;
      head = at;
    }
  }

  // Store what of these tokens, from `begin` to `end`, is not there yet, with a few tokens before and behind it.
  void absorb(const int* tokens, size_t begin, size_t end) {
    size_t stored_until = begin;  // whether they are there already or not
    for (size_t i = begin; i < end;) {
      if (const size_t same = i < stored_until ? 0 : known_run(tokens, i, end)) {
        if (ends_like(tokens, i))
          for (size_t k = i; k < i + CONTEXT; k++) append(tokens[k]);
        i += same;
        stored_until = i + CONTEXT;
        continue;
      }
      if (!ends_like(tokens, i)) {
        append(SEPARATOR);
        for (size_t k = i - std::min<size_t>(i, CONTEXT); k < i; k++) append(tokens[k]);
      }
      append(tokens[i++]);
    }
  }

  // What may follow a text that ends with these tokens: what has followed the longest end of it that was seen before.
  Draft draft(const std::vector<int>& tail, int most) const {
    Draft found;
    if (tail.empty()) return found;
    uint64_t hashes[LEVELS];
    int levels = 0;
    uint64_t hash = 0;
    for (int seen = 0; levels < LEVELS && int(tail.size()) >= LENGTHS[levels]; levels++) {
      for (; seen < LENGTHS[levels]; seen++) hash = mixed(hash, tail[tail.size() - 1 - seen]);
      hashes[levels] = hash;
    }
    uint64_t places[WALK];
    int matches[WALK], count = 0;
    for (int level = levels - 1; level >= 0 && !count; level--)
      walk(level, hashes[level], WALK, [&](uint64_t at) {
        const int match = common(at, tail.data() + tail.size() - 1, int(tail.size()));
        if (match >= LENGTHS[level] && at < last_ && ring_[(at + 1) & mask_] != SEPARATOR) {
          places[count] = at, matches[count++] = match;
          found.match = std::max(found.match, match);
        }
      });
    int left = 0;
    for (int i = 0; i < count; i++)
      if (matches[i] == found.match) places[left++] = places[i];
    // A text that repeats itself right at its end goes on with its own draft.
    const bool goes_on = common(last_, tail.data() + tail.size() - 1, int(tail.size())) >= std::min<int>(int(tail.size()), CONTEXT);
    while (left && int(found.tokens.size()) < most) left = vote(found, places, left, goes_on);
    return found;
  }

 private:
  static int bits_of(size_t tokens) {
    int bits = 10;
    while (bits < 30 && (size_t(1) << (bits + 1)) <= tokens) bits++;
    return bits;
  }
  static uint64_t mixed(uint64_t hash, int token) { return (hash ^ (uint32_t(token) + 1)) * 0x9E3779B97F4A7C15u ^ (hash >> 29); }
  size_t bucket(uint64_t hash) const { return (hash * 0xD1B54A32D192ED03u) >> shift_; }
  bool is_there(uint64_t at) const { return at && at <= last_ && last_ - at < capacity_; }

  // Places of a bucket, the latest first. They are kept in 32 bits: what would not be older than the one before has been overwritten.
  template <typename Visit>
  void walk(int level, uint64_t hash, int most, Visit visit) const {
    uint64_t age = 0;
    uint32_t at = heads_[level][bucket(hash)];
    for (int step = 0; step < most && at; step++) {
      const uint64_t back = uint32_t(uint32_t(last_) - at);
      if (back >= capacity_ || back >= last_ || (step && back <= age)) return;
      age = back;
      visit(last_ - back);
      at = before_[level][at & mask_];
    }
  }

  // How many tokens that end at a place are those that end at `end`.
  int common(uint64_t at, const int* end, int most) const {
    most = std::min(most, LONGEST);
    int same = 0;
    while (same < most && is_there(at - same) && ring_[(at - same) & mask_] == end[-same]) same++;
    return same;
  }

  bool ends_like(const int* tokens, size_t i) const {
    const int needed = int(std::min<size_t>(i, CONTEXT));
    return needed && common(last_, tokens + i - 1, needed) == needed;
  }

  // How many tokens from `i` on are there already in a row; 0 if they are few, or will soon be forgotten.
  size_t known_run(const int* tokens, size_t i, size_t end) const {
    if (end - i < SAME) return 0;
    uint64_t hash = 0;
    for (int seen = 0; seen < LENGTHS[LEVELS - 1]; seen++) hash = mixed(hash, tokens[i + LENGTHS[LEVELS - 1] - 1 - seen]);
    size_t longest = 0;
    walk(LEVELS - 1, hash, WALK, [&](uint64_t at) {
      uint64_t place = at - LENGTHS[LEVELS - 1] + 1;
      if (!is_there(place) || last_ - place > (capacity_ == most_ ? capacity_ / 2 : capacity_)) return;
      size_t same = 0;
      while (i + same < end && place + same <= last_ && ring_[(place + same) & mask_] == tokens[i + same]) same++;
      longest = std::max(longest, same);
    });
    return longest >= SAME ? longest : 0;
  }

  // Add what most of the places go on with to the draft, the latest place first among equals. Places that go on otherwise leave.
  int vote(Draft& draft, uint64_t* places, int count, bool goes_on) const {
    int following[WALK], best = SEPARATOR, votes = 0, total = 0;
    for (int i = 0; i < count; i++) total += (following[i] = after(++places[i], draft, goes_on)) != SEPARATOR;
    for (int i = 0; i < count; i++) {
      if (following[i] == SEPARATOR) continue;
      const int same = int(std::count(following, following + count, following[i]));
      if (same > votes) votes = same, best = following[i];
    }
    if (!votes) return 0;
    draft.tokens.push_back(best);
    draft.support.push_back(total == 1 ? ONE : votes == total ? ALL : 2 * votes >= total ? HALF : FEW);
    int left = 0;
    for (int i = 0; i < count; i++)
      if (following[i] == best) places[left++] = places[i];
    return left;
  }

  int after(uint64_t at, const Draft& draft, bool goes_on) const {
    if (at <= last_) return ring_[at & mask_];
    const uint64_t ahead = at - last_ - 1;
    return goes_on && ahead < draft.tokens.size() ? draft.tokens[ahead] : SEPARATOR;
  }

  void resize(size_t capacity) {
    capacity_ = capacity, mask_ = capacity - 1, shift_ = 64 - bits_of(capacity);
    last_ = 0, run_ = 0;
    ring_.assign(capacity, SEPARATOR);
    for (int level = 0; level < LEVELS; level++) heads_[level].assign(capacity, 0), before_[level].assign(capacity, 0);
  }

  void grow() {
    const std::vector<int> old = std::move(ring_);
    const uint64_t last = last_, had = tokens(), mask = mask_;
    resize(2 * capacity_);
    for (uint64_t at = last - had + 1; at <= last; at++) append(old[at & mask]);
  }

  size_t most_, capacity_ = 0, mask_ = 0;
  int shift_ = 0, run_ = 0;
  uint64_t last_ = 0;  // the place of the latest token; the first is 1
  std::vector<int> ring_;
  std::vector<uint32_t> heads_[LEVELS], before_[LEVELS];
};

}  // namespace everwarm

#include "threads.h"

#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace everwarm {

namespace {

constexpr int SPINS_BEFORE_YIELD = 2000;  // some 20 us: longer than any gap between two loops of a token
constexpr auto SPIN_BEFORE_SLEEP = std::chrono::microseconds(200);

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The word: 24 bits epoch, 20 bits count, 20 bits next index.
constexpr int INDEX_BITS = 20;
constexpr uint64_t INDEX_MASK = (1u << INDEX_BITS) - 1, NEXT_EPOCH = uint64_t(1) << 2 * INDEX_BITS;
uint64_t epoch_of(uint64_t word) { return word >> 2 * INDEX_BITS; }
int count_of(uint64_t word) { return int(word >> INDEX_BITS & INDEX_MASK); }
int index_of(uint64_t word) { return int(word & INDEX_MASK); }

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
  stop_ = true;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    word_ = (epoch_of(word_) + 1) * NEXT_EPOCH;
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// The loop can't change under a successful claim: a new one starts only when every claimed index of the old one is done.
bool Pool::claim_one(int thread) {
  uint64_t word = word_.load(std::memory_order_acquire);
  while (index_of(word) < count_of(word)) {
    const Call call = call_.load(std::memory_order_relaxed);
    void* const context = context_.load(std::memory_order_relaxed);
    if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      call(context, index_of(word), thread);
      done_.fetch_add(1, std::memory_order_release);
      return true;
    }
  }
  return false;
}

void Pool::run(int count, Call call, void* context) {
  if (workers_.empty() || count <= 1 || uint64_t(count) > INDEX_MASK) {
    for (int i = 0; i < count; i++) call(context, i, 0);
    return;
  }
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = epoch_of(word_.load(std::memory_order_relaxed)) + 1;
  word_.store(epoch * NEXT_EPOCH | uint64_t(count) << INDEX_BITS, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
  }
  while (claim_one(0)) {
  }
  for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
    if (spins < SPINS_BEFORE_YIELD)
      pause();
    else
      sched_yield();
  }
}

void Pool::serve(int thread) {
  uint64_t seen = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    auto sleep_at = std::chrono::steady_clock::now() + SPIN_BEFORE_SLEEP;
    for (int spins = 0; epoch_of(word_.load(std::memory_order_acquire)) == seen; spins++) {
      pause();
      if (spins % 64 == 63 && std::chrono::steady_clock::now() > sleep_at) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return epoch_of(word_.load(std::memory_order_seq_cst)) != seen; });
        sleeping_.fetch_sub(1, std::memory_order_relaxed);
        break;
      }
    }
    seen = epoch_of(word_.load(std::memory_order_acquire));
    while (claim_one(thread)) {
    }
  }
}

}  // namespace everwarm

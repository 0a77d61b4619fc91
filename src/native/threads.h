// A pool of threads that share the indices of one loop at a time.
//
// Every index is claimed by compare-and-swap on one word (epoch, count, next index), so a thread that wakes up late finds nothing to claim
// and nobody waits for it: only for indices that were claimed and are not done. Threads spin for a moment between loops, because the
// loops of one token follow each other within microseconds, then sleep. Whoever waits for long yields its core: with more runnable
// threads than cores, the one that is waited for needs it.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace everwarm {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // work(index, thread) for each index below count; thread is below threads(). Returns when all are done. One caller at a time.
  template <class Work>
  void run(int count, Work&& work) {
    run(count, [](void* context, int index, int thread) { (*static_cast<Work*>(context))(index, thread); }, &work);
  }

 private:
  using Call = void (*)(void*, int, int);
  void run(int count, Call call, void* context);
  bool claim_one(int thread);
  void serve(int thread);

  std::vector<std::thread> workers_;
  std::atomic<uint64_t> word_{0};  // epoch, count, next index: see threads.cpp
  std::atomic<int> done_{0}, sleeping_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace everwarm

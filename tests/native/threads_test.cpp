// The thread pool under ThreadSanitizer (`make sanitize`): every index runs exactly once, what work wrote is visible after run(), and
// workers that sleep wake up. Exits with 1 at the first thing that is wrong.
#include "threads.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

using everwarm::Pool;

namespace {

constexpr auto LONGER_THAN_SPIN = std::chrono::milliseconds(2);  // workers spin for 200 us, then sleep
constexpr int MAX_THREADS = 4;

// Plain ints on purpose: if run() did not order its threads' accesses, ThreadSanitizer would report these.
void check_run(Pool& pool, int count) {
  std::vector<int> runs(count, 0), by_thread(pool.threads(), 0);
  pool.run(count, [&](int index, int thread) {
    if (index < 0 || index >= count || thread < 0 || thread >= pool.threads()) {
      std::fprintf(stderr, "index %d, thread %d: out of %d and %d\n", index, thread, count, pool.threads());
      std::exit(1);
    }
    runs[index]++;
    by_thread[thread]++;
  });
  int total = 0;
  for (int n : by_thread) total += n;
  for (int index = 0; index < count; index++)
    if (runs[index] != 1 || total != count) {
      std::fprintf(stderr, "%d threads, count %d: index %d ran %d times, %d runs in all\n", pool.threads(), count, index, runs[index],
                   total);
      std::exit(1);
    }
}

void loops_that_follow_each_other(int threads) {
  Pool pool(threads);
  for (int round = 0; round < 300; round++)
    for (int count : {0, 1, 2, 3, threads, threads + 1, 17, 64, 257}) check_run(pool, count);
  check_run(pool, 10000);
}

void loops_after_a_pause(int threads) {
  Pool pool(threads);
  for (int round = 0; round < 100; round++) {
    std::this_thread::sleep_for(LONGER_THAN_SPIN);
    check_run(pool, 1 + round % 40);
  }
}

// Pauses around the very moment at which workers go to sleep. A lost wake-up is allowed to cost time only: the caller does the work.
void loops_while_workers_fall_asleep(int threads) {
  Pool pool(threads);
  for (int round = 0; round < 500; round++) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(150 + round % 100);
    while (std::chrono::steady_clock::now() < until) {
    }
    check_run(pool, 8);
  }
}

void pools_that_come_and_go(int threads) {
  for (int round = 0; round < 200; round++) {
    Pool pool(threads);
    if (round % 3) check_run(pool, round % 50);
    if (round % 20 == 0) std::this_thread::sleep_for(LONGER_THAN_SPIN);
  }
}

// A pool outlives another one, and runs while the other sleeps; the inner one is also used from the outer one's work.
void pools_within_pools(int threads) {
  auto first = std::make_unique<Pool>(threads);
  for (int round = 0; round < 30; round++) {
    auto second = std::make_unique<Pool>(1 + round % MAX_THREADS);
    check_run(*first, 33);
    check_run(*second, 33);
    first.swap(second);
    second.reset();
    check_run(*first, 33);
  }
  Pool outer(threads);
  outer.run(12, [&](int index, int) {
    Pool inner(2);
    check_run(inner, index);
  });
}

// One caller at a time, but not always the same thread: Python's threads take turns.
void callers_that_take_turns(int threads) {
  Pool pool(threads);
  for (int round = 0; round < 50; round++) std::thread([&] { check_run(pool, 20); }).join();
}

}  // namespace

int main() {
  for (int threads = 1; threads <= MAX_THREADS; threads++) {
    loops_that_follow_each_other(threads);
    loops_after_a_pause(threads);
    loops_while_workers_fall_asleep(threads);
    pools_that_come_and_go(threads);
    pools_within_pools(threads);
    callers_that_take_turns(threads);
  }
  std::puts("threads_test: every index ran exactly once");
}

// Work on several threads that the calling thread can end, and how long it may take.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace devplace {

// The instant `seconds` from now; at most 30 years, so that no sum of times overflows.
inline std::chrono::steady_clock::time_point deadline_in(double seconds) {
  const double bounded = seconds < 1e9 ? std::max(seconds, 0.0) : 1e9;
  return std::chrono::steady_clock::now() +
         std::chrono::microseconds(static_cast<std::int64_t>(bounded * 1e6));
}

// Runs work(0) to work(threads - 1), each on its thread. `poll` is called every 50 ms on the
// calling thread; once it is true, `stop` is set.
//
// Where a thread cannot be started, or `work` throws (memory may run out), the others are told to
// stop and waited for; then the error is thrown here.
template <class Poll, class Work>
void run_threads(int threads, std::atomic<bool>& stop, Poll poll, Work work) {
  std::mutex mutex;
  std::condition_variable ended;
  std::exception_ptr failure;
  int running = 0;
  std::vector<std::thread> workers;
  workers.reserve(threads);
  for (int t = 0; t < threads && !stop; ++t) {
    std::lock_guard<std::mutex> lock(mutex);
    try {
      workers.emplace_back([&, t] {
        std::exception_ptr thrown;
        try {
          work(t);
        } catch (...) {
          thrown = std::current_exception();
          stop = true;
        }
        std::lock_guard<std::mutex> lock(mutex);
        if (thrown && !failure) failure = thrown;
        --running;
        ended.notify_one();
      });
      ++running;
    } catch (const std::system_error&) {
      stop = true;
      if (!failure) failure = std::make_exception_ptr(std::runtime_error(
          "only " + std::to_string(t) + " of " + std::to_string(threads) +
          " threads can be started"));
    } catch (...) {  // no memory for one
      stop = true;
      if (!failure) failure = std::current_exception();
    }
  }
  for (std::unique_lock<std::mutex> lock(mutex); running > 0;) {
    ended.wait_for(lock, std::chrono::milliseconds(50));
    if (running == 0) break;
    lock.unlock();
    if (poll()) stop = true;
    lock.lock();
  }
  for (auto& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace devplace

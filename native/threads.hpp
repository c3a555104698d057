// Work on several threads that the calling thread can end.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace devplace {

// Runs work(0) to work(threads - 1), each on its thread. `poll` is called every 50 ms on the
// calling thread; once it is true, `stop` is set.
template <class Poll, class Work>
void run_threads(int threads, std::atomic<bool>& stop, Poll poll, Work work) {
  std::mutex mutex;
  std::condition_variable ended;
  int running = threads;
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t)
    workers.emplace_back([&, t] {
      work(t);
      std::lock_guard<std::mutex> lock(mutex);
      --running;
      ended.notify_one();
    });
  for (std::unique_lock<std::mutex> lock(mutex); running > 0;) {
    ended.wait_for(lock, std::chrono::milliseconds(50));
    if (running == 0) break;
    lock.unlock();
    if (poll()) stop = true;
    lock.lock();
  }
  for (auto& worker : workers) worker.join();
}

}  // namespace devplace

// Sets of ready tasks, kept as bits by rank: the first is found without a comparison.
#pragma once

#include <vector>

#include "../simulator/kernel.hpp"

namespace devplace {

using u64 = std::uint64_t;

inline i32 lowest_bit(u64 word) { return static_cast<i32>(__builtin_ctzll(word)); }

// Numbers 0 .. size - 1; every word of a level says which words below it are not zero.
class RankSet {
 public:
  void resize(i32 size) {
    const std::size_t low = (static_cast<std::size_t>(size) + 63) / 64 + 1;
    low_.assign(low, 0);
    middle_.assign((low + 63) / 64, 0);
    high_.assign((middle_.size() + 63) / 64, 0);
  }
  void clear() {
    for (std::size_t h = 0; h < high_.size(); ++h)
      for (u64 middles = high_[h]; middles; middles &= middles - 1) {
        u64& middle = middle_[h * 64 + lowest_bit(middles)];
        const std::size_t base = (h * 64 + lowest_bit(middles)) * 64;
        for (u64 lows = middle; lows; lows &= lows - 1) low_[base + lowest_bit(lows)] = 0;
        middle = 0;
      }
    std::fill(high_.begin(), high_.end(), 0);
    count_ = 0;
  }
  bool empty() const { return count_ == 0; }
  void insert(i32 rank) {
    low_[rank >> 6] |= u64{1} << (rank & 63);
    middle_[rank >> 12] |= u64{1} << ((rank >> 6) & 63);
    high_[rank >> 18] |= u64{1} << ((rank >> 12) & 63);
    ++count_;
  }
  // The smallest; the set must not be empty.
  i32 first() const {
    std::size_t h = 0;
    while (!high_[h]) ++h;
    const std::size_t m = h * 64 + lowest_bit(high_[h]);
    const std::size_t l = m * 64 + lowest_bit(middle_[m]);
    return static_cast<i32>(l * 64) + lowest_bit(low_[l]);
  }
  i32 pop() {
    std::size_t h = 0;
    while (!high_[h]) ++h;
    const std::size_t m = h * 64 + lowest_bit(high_[h]);
    const std::size_t l = m * 64 + lowest_bit(middle_[m]);
    const i32 rank = static_cast<i32>(l * 64) + lowest_bit(low_[l]);
    --count_;
    if (low_[l] &= low_[l] - 1) return rank;
    if (middle_[m] &= middle_[m] - 1) return rank;
    high_[h] &= high_[h] - 1;
    return rank;
  }
  template <class Visit>
  void each(const Visit& visit) const {
    for (std::size_t h = 0; h < high_.size(); ++h)
      for (u64 middles = high_[h]; middles; middles &= middles - 1) {
        const std::size_t m = h * 64 + lowest_bit(middles);
        for (u64 lows = middle_[m]; lows; lows &= lows - 1) {
          const std::size_t l = m * 64 + lowest_bit(lows);
          for (u64 bits = low_[l]; bits; bits &= bits - 1)
            visit(static_cast<i32>(l * 64) + lowest_bit(bits));
        }
      }
  }

 private:
  std::vector<u64> low_, middle_, high_;
  i32 count_ = 0;
};

// Tasks by falling priority, then rising index: what ranks mean.
class Ranks {
 public:
  i32 of(i32 task) const { return rank_[task]; }
  i32 task(i32 rank) const { return task_[rank]; }

  // Sorts by digits, as many as the largest priority has.
  void set(const std::vector<i64>& priority, std::vector<i32>& spare) {
    const std::size_t N = priority.size();
    task_.resize(N);
    rank_.resize(N);
    spare.resize(N);
    i64 least = 0, most = 0;
    for (std::size_t v = 0; v < N; ++v) {
      least = v ? std::min(least, priority[v]) : priority[v];
      most = v ? std::max(most, priority[v]) : priority[v];
      task_[v] = static_cast<i32>(v);
    }
    const u64 width = static_cast<u64>(most) - static_cast<u64>(least);
    for (int shift = 0; shift < 64 && (width >> shift); shift += bits) {
      std::size_t begin[(1 << bits) + 1] = {};
      auto digit = [&](i32 v) {
        return ((static_cast<u64>(most) - static_cast<u64>(priority[v])) >> shift) & ((1 << bits) - 1);
      };
      for (std::size_t v = 0; v < N; ++v) ++begin[digit(static_cast<i32>(v)) + 1];
      for (int k = 0; k < (1 << bits); ++k) begin[k + 1] += begin[k];
      for (const i32 v : task_) spare[begin[digit(v)]++] = v;
      task_.swap(spare);
    }
    for (std::size_t r = 0; r < N; ++r) rank_[task_[r]] = static_cast<i32>(r);
  }
  void swap(Ranks& other) {
    rank_.swap(other.rank_);
    task_.swap(other.task_);
  }

 private:
  static constexpr int bits = 11;
  std::vector<i32> rank_, task_;
};

}  // namespace devplace

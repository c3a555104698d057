// Longest paths to the end of the step, kept up to date while tasks move.
#pragma once

#include <utility>
#include <vector>

#include "../simulator/kernel.hpp"

namespace devplace {

class Tails {
 public:
  explicit Tails(const Core& core) : core_(core) { dirty_.assign(core.num_tasks, 0); }

  // With the task's own time; critical-path priorities.
  const std::vector<i64>& length() const { return length_; }

  void set(const std::vector<i32>& device) {
    length_.resize(core_.num_tasks);
    critical_path(core_, device.data(), length_.data());
    changed_.clear();
  }

  // After `moves` were made: only what they touch, upwards; tells `visit` what changed.
  template <class Visit>
  void update(const std::vector<std::pair<i32, i32>>& moves, const std::vector<i32>& device,
              const Visit& visit) {
    changed_.clear();
    i32 top = -1;
    auto mark = [&](i32 v) {
      dirty_[v] = 1;
      top = std::max(top, v);
    };
    for (const auto& [v, old] : moves) {
      mark(v);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) mark(core_.in_task[j]);
    }
    for (i32 v = top; v >= 0; --v) {
      if (!dirty_[v]) continue;
      dirty_[v] = 0;
      const i64 length = path_length(core_, device.data(), length_.data(), v);
      if (length == length_[v]) continue;
      changed_.push_back({v, length_[v]});
      length_[v] = length;
      visit(v, length);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) dirty_[core_.in_task[j]] = 1;
    }
  }

  // Takes back the last update.
  template <class Visit>
  void undo(const Visit& visit) {
    for (const auto& [v, length] : changed_) {
      length_[v] = length;
      visit(v, length);
    }
    changed_.clear();
  }

 private:
  const Core& core_;
  std::vector<i64> length_;
  std::vector<u8> dirty_;
  std::vector<std::pair<i32, i64>> changed_;
};

}  // namespace devplace

// Longest paths to the end of the step, kept up to date while tasks move.
#pragma once

#include <utility>
#include <vector>

#include "clock.hpp"

namespace devplace {

// Of the tasks of a clock: reads their devices and sets their tails.
class Tails {
 public:
  Tails(const Core& core, std::vector<Clock::Node>& nodes) : core_(core), nodes_(nodes) {
    dirty_.assign(core.num_tasks, 0);
  }

  void set(const std::vector<i32>& device) {
    for (i32 v = core_.num_tasks - 1; v >= 0; --v) nodes_[v].tail = length_of(v, device);
  }

  // After `moves` were made: only what they touch, upwards.
  void update(const std::vector<std::pair<i32, i32>>& moves, const std::vector<i32>& device) {
    changed_.clear();
    before_.clear();
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
      const i64 length = length_of(v, device);
      if (length == nodes_[v].tail) continue;
      changed_.push_back(v);
      before_.push_back(nodes_[v].tail);
      nodes_[v].tail = length;
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) dirty_[core_.in_task[j]] = 1;
    }
  }

  // Takes back the last update.
  void undo() {
    for (std::size_t k = 0; k < changed_.size(); ++k) nodes_[changed_[k]].tail = before_[k];
    changed_.clear();
    before_.clear();
  }

 private:
  i64 length_of(i32 v, const std::vector<i32>& device) const {
    return path_length(core_, device.data(), [&](i32 c) { return nodes_[c].tail; }, v);
  }

  const Core& core_;
  std::vector<Clock::Node>& nodes_;
  std::vector<u8> dirty_;
  std::vector<i32> changed_;
  std::vector<i64> before_;
};

}  // namespace devplace

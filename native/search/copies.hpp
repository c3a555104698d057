// Time to copy the batch to its devices, kept up while tasks move.
#pragma once

#include <vector>

#include "../simulator/kernel.hpp"

namespace devplace {

class Copies {
 public:
  explicit Copies(const Core& core) : core_(core) {}

  i64 batch_ns() const { return batch_ns_; }

  void set(const std::vector<i32>& device) {
    readers_.assign(core_.copied.size() * core_.num_devices, 0);
    batch_ns_ = 0;
    for (i32 v = 0; v < core_.num_tasks; ++v) change(v, device[v], 1);
  }

  void move(i32 task, i32 from, i32 to) {
    change(task, from, -1);
    change(task, to, 1);
  }

 private:
  void change(i32 task, i32 device, i32 by) {
    for (i32 j = core_.read_ptr[task]; j < core_.read_ptr[task + 1]; ++j) {
      const std::size_t place = core_.read_copied[j], D = core_.num_devices;
      i32& readers = readers_[place * D + device];
      const i64 ns = core_.copy_ns[core_.copied[place] * D + device];
      if (by > 0 && readers == 0) batch_ns_ += ns;
      readers += by;
      if (by < 0 && readers == 0) batch_ns_ -= ns;
    }
  }

  const Core& core_;
  std::vector<i32> readers_;  // [copied, D]
  i64 batch_ns_ = 0;
};

}  // namespace devplace

// A placement of items with its loads, kept up to date under moves of single items.
#pragma once

#include "hypergraph.hpp"

namespace devplace_load {

class State {
 public:
  State(const Hypergraph& h, const std::vector<i32>& device) : h_(h), device_(device) {
    const i32 D = h.devices();
    load_.assign(D, 0);
    held_.assign(D, 0);
    count_.assign(static_cast<std::size_t>(h.num_nets()) * D, 0);
    touched_.assign(h.num_nets(), 0);
    for (i32 v = 0; v < h.num_items; ++v) {
      const i32 d = device_[v];
      load_[d] += time(v, d);
      held_[d] += h.size[v];
    }
    for (i32 e = 0; e < h.num_nets(); ++e) {
      i32* count = &count_[static_cast<std::size_t>(e) * D];
      for (i32 x = h.net_ptr[e]; x < h.net_ptr[e + 1]; ++x)
        if (count[device_[h.pins[x]]]++ == 0) ++touched_[e];
      if (touched_[e] > 1)
        for (i32 d = 0; d < h.accelerators; ++d)
          if (count[d]) load_[d] += h.cost[e];
    }
    for (i32 d = 0; d < h.accelerators; ++d) over_ += held_[d] > h.memory;
  }

  i64 time(i32 v, i32 d) const {
    return d < h_.accelerators ? h_.accelerator[v] : h_.cpu[v];
  }
  // Loads of the two devices of a move after it; no other device's load changes.
  void peek(i32 v, i32 b, i64& load_a, i64& load_b) const {
    const i32 D = h_.devices(), a = device_[v];
    load_a = load_[a] - time(v, a);
    load_b = load_[b] + time(v, b);
    const bool pays_a = a < h_.accelerators, pays_b = b < h_.accelerators;
    for (i32 y = h_.item_ptr[v]; y < h_.item_ptr[v + 1]; ++y) {
      const i32 e = h_.item_nets[y];
      const i32* count = &count_[static_cast<std::size_t>(e) * D];
      const i32 lambda = touched_[e], after = lambda - (count[a] == 1) + (count[b] == 0);
      const i64 cost = h_.cost[e];
      if (pays_a) load_a += ((count[a] > 1 && after > 1) ? cost : 0) - (lambda > 1 ? cost : 0);
      if (pays_b) load_b += (after > 1 ? cost : 0) - ((count[b] && lambda > 1) ? cost : 0);
    }
  }
  void move(i32 v, i32 b, i64 load_a, i64 load_b) {
    const i32 D = h_.devices(), a = device_[v];
    for (i32 y = h_.item_ptr[v]; y < h_.item_ptr[v + 1]; ++y) {
      const i32 e = h_.item_nets[y];
      i32* count = &count_[static_cast<std::size_t>(e) * D];
      if (--count[a] == 0) --touched_[e];
      if (count[b]++ == 0) ++touched_[e];
    }
    load_[a] = load_a;
    load_[b] = load_b;
    if (a < h_.accelerators) over_ -= held_[a] > h_.memory;
    if (b < h_.accelerators) over_ -= held_[b] > h_.memory;
    held_[a] -= h_.size[v];
    held_[b] += h_.size[v];
    if (a < h_.accelerators) over_ += held_[a] > h_.memory;
    if (b < h_.accelerators) over_ += held_[b] > h_.memory;
    device_[v] = b;
  }
  void move(i32 v, i32 b) {
    i64 load_a, load_b;
    peek(v, b, load_a, load_b);
    move(v, b, load_a, load_b);
  }
  i64 value() const { return *std::max_element(load_.begin(), load_.end()); }
  i64 excess() const {
    i64 sum = 0;
    for (i32 d = 0; d < h_.accelerators; ++d) sum += std::max<i64>(0, held_[d] - h_.memory);
    return sum;
  }
  bool fits() const { return over_ == 0; }
  const std::vector<i32>& device() const { return device_; }
  const std::vector<i64>& load() const { return load_; }
  const std::vector<i64>& held() const { return held_; }
  const Hypergraph& hypergraph() const { return h_; }

 private:
  const Hypergraph& h_;
  std::vector<i32> device_;
  std::vector<i64> load_, held_;
  std::vector<i32> count_, touched_;  // pins of each net on each device; devices it touches
  i32 over_ = 0;
};

}  // namespace devplace_load

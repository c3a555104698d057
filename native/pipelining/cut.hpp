// Least load of any accelerator that holds a given item, by minimum cut.
//
// The load of a set S is its work plus the cost of each net with ends both in and out of S: a
// cut of a hypergraph. The least over all S that hold item i bounds the largest load from below.
#pragma once

#include "hypergraph.hpp"

namespace devplace_load {

class MinCut {  // Dinic (1970)
 public:
  explicit MinCut(const Hypergraph& h) : h_(h), sink_(h.num_items + 2 * h.num_nets()) {
    first_.assign(sink_ + 1, -1);
    for (i32 v = 0; v < h.num_items; ++v) arc(v, sink_, h.accelerator[v]);
    for (i32 e = 0; e < h.num_nets(); ++e) {
      const i32 in = h.num_items + 2 * e, out = in + 1;
      arc(in, out, h.cost[e]);
      for (i32 x = h.net_ptr[e]; x < h.net_ptr[e + 1]; ++x)
        arc(h.pins[x], in, kInfinite), arc(out, h.pins[x], kInfinite);
    }
    full_ = capacity_;
  }
  i64 least_load(i32 item) {
    capacity_ = full_;
    i64 total = 0;
    while (layers(item)) {
      next_ = first_;
      while (const i64 pushed = push(item)) total += pushed;
    }
    return total;
  }

 private:
  static constexpr i64 kInfinite = INT64_MAX / 4;
  void arc(i32 a, i32 b, i64 capacity) {
    for (const auto& [from, to, c] : {std::tuple{a, b, capacity}, std::tuple{b, a, i64{0}}}) {
      to_.push_back(to), capacity_.push_back(c), link_.push_back(first_[from]);
      first_[from] = static_cast<i32>(to_.size()) - 1;
    }
  }
  bool layers(i32 source) {
    depth_.assign(sink_ + 1, -1);
    depth_[source] = 0;
    queue_.assign(1, source);
    for (std::size_t head = 0; head < queue_.size(); ++head)
      for (i32 x = first_[queue_[head]]; x >= 0; x = link_[x])
        if (capacity_[x] > 0 && depth_[to_[x]] < 0)
          depth_[to_[x]] = depth_[queue_[head]] + 1, queue_.push_back(to_[x]);
    return depth_[sink_] >= 0;
  }
  i64 push(i32 source) {  // one augmenting path, without recursion
    path_.clear();
    for (i32 v = source; v != sink_;) {
      i32& x = next_[v];
      while (x >= 0 && (capacity_[x] == 0 || depth_[to_[x]] != depth_[v] + 1)) x = link_[x];
      if (x >= 0) {
        path_.push_back(x);
        v = to_[x];
        continue;
      }
      if (path_.empty()) return 0;
      depth_[v] = -1;
      v = to_[path_.back() ^ 1];
      path_.pop_back();
    }
    i64 pushed = kInfinite;
    for (const i32 x : path_) pushed = std::min(pushed, capacity_[x]);
    for (const i32 x : path_) capacity_[x] -= pushed, capacity_[x ^ 1] += pushed;
    return pushed;
  }

  const Hypergraph& h_;
  i32 sink_;
  std::vector<i32> first_, next_, link_, to_, depth_, queue_, path_;
  std::vector<i64> capacity_, full_;
};

}  // namespace devplace_load

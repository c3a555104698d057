// Block latency of one sample, and annealing for it.
//
// An accelerator's nodes are cut into pieces; a piece starts when all its inputs are in host
// memory and takes in-communication + work + out-communication as one block. CPU nodes run as soon
// as their inputs are there. See devplace.pipelining.block_latency for the plain Python form.
#pragma once

#include <cmath>

#include "anneal.hpp"
#include "../threads.hpp"

namespace devplace_load {

struct BlockGraph {
  i32 num_nodes = 0, num_items = 0, accelerators = 0, devices = 0;
  i64 memory = 0;
  std::vector<i64> accelerator, cpu, size, cost;  // per node; cost of moving its output
  std::vector<u8> can_accelerate;
  std::vector<i32> item;                      // class of each node
  std::vector<i32> order;                     // nodes in topological order
  std::vector<i32> in_ptr, in, out_ptr, out;  // distinct neighbours
  std::vector<i32> item_ptr, members;
};

class BlockEvaluator {
 public:
  explicit BlockEvaluator(const BlockGraph& g) : g_(g), depth_(g.num_nodes * g.accelerators) {}

  // Latency of a placement of nodes, or -1 where pieces wait for each other.
  i64 run(const std::vector<i32>& device) {
    number_pieces(device);
    charge(device);
    return finish(device);
  }

 private:
  void number_pieces(const std::vector<i32>& device) {
    const i32 k = g_.accelerators;
    unit_.resize(g_.num_nodes);
    last_.assign(k, 0);
    for (const i32 v : g_.order) {
      i32* mine = &depth_[static_cast<std::size_t>(v) * k];
      std::fill(mine, mine + k, 0);
      for (i32 x = g_.in_ptr[v]; x < g_.in_ptr[v + 1]; ++x) {
        const i32* theirs = &depth_[static_cast<std::size_t>(g_.in[x]) * k];
        for (i32 d = 0; d < k; ++d) mine[d] = std::max(mine[d], theirs[d]);
      }
      const i32 d = device[v];
      if (d >= k) continue;
      i32 piece = 1;
      for (i32 x = g_.in_ptr[v]; x < g_.in_ptr[v + 1]; ++x) {
        const i32 u = g_.in[x];
        piece = std::max(piece, depth_[static_cast<std::size_t>(u) * k + d] + (device[u] != d));
      }
      mine[d] = piece;
      last_[d] = std::max(last_[d], piece);
    }
    first_.assign(k + 1, 0);
    for (i32 d = 0; d < k; ++d) first_[d + 1] = first_[d] + last_[d];
    units_ = first_[k];
    for (const i32 v : g_.order) {
      const i32 d = device[v];
      unit_[v] = d < k ? first_[d] + depth_[static_cast<std::size_t>(v) * k + d] - 1 : units_++;
    }
  }
  void charge(const std::vector<i32>& device) {
    length_.assign(units_, 0);
    waits_.assign(units_, 0);
    seen_.assign(units_, -1);
    const i32 pieces = first_[g_.accelerators];
    for (i32 v = 0; v < g_.num_nodes; ++v) {
      const i32 unit = unit_[v];
      length_[unit] += device[v] < g_.accelerators ? g_.accelerator[v] : g_.cpu[v];
      seen_[unit] = v;
      for (i32 x = g_.out_ptr[v]; x < g_.out_ptr[v + 1]; ++x) {
        const i32 to = unit_[g_.out[x]];
        if (to == unit) continue;
        ++waits_[to];
        if (seen_[to] != v) {
          seen_[to] = v;
          if (to < pieces) length_[to] += g_.cost[v];
        }
        if (unit < pieces && seen_[unit] == v) seen_[unit] = -2 - v, length_[unit] += g_.cost[v];
      }
    }
  }
  i64 finish(const std::vector<i32>&) {
    members_ptr_.assign(units_ + 1, 0);
    for (i32 v = 0; v < g_.num_nodes; ++v) ++members_ptr_[unit_[v] + 1];
    std::partial_sum(members_ptr_.begin(), members_ptr_.end(), members_ptr_.begin());
    members_.resize(g_.num_nodes);
    next_.assign(members_ptr_.begin(), members_ptr_.end() - 1);
    for (i32 v = 0; v < g_.num_nodes; ++v) members_[next_[unit_[v]]++] = v;
    start_.assign(units_, 0);
    ready_.clear();
    for (i32 u = 0; u < units_; ++u)
      if (waits_[u] == 0) ready_.push_back(u);
    i64 latest = 0;
    std::size_t head = 0;
    for (; head < ready_.size(); ++head) {
      const i32 u = ready_[head];
      const i64 end = start_[u] + length_[u];
      latest = std::max(latest, end);
      for (i32 y = members_ptr_[u]; y < members_ptr_[u + 1]; ++y)
        for (i32 x = g_.out_ptr[members_[y]]; x < g_.out_ptr[members_[y] + 1]; ++x) {
          const i32 to = unit_[g_.out[x]];
          if (to == u) continue;
          start_[to] = std::max(start_[to], end);
          if (--waits_[to] == 0) ready_.push_back(to);
        }
    }
    return static_cast<i32>(head) == units_ ? latest : -1;
  }

  const BlockGraph& g_;
  std::vector<i32> depth_, unit_, last_, first_, waits_, seen_, members_ptr_, members_, next_, ready_;
  std::vector<i64> length_, start_;
  i32 units_ = 0;
};

class BlockSearcher {
 public:
  BlockSearcher(const BlockGraph& g, u64 seed, const Limits& limits)
      : g_(g), random_(seed), limits_(limits), evaluator_(g) {
    for (const i32 v : g.order)
      if (g.members[g.item_ptr[g.item[v]]] == v) items_.push_back(g.item[v]);
    rank_.assign(g.num_items, 0);
    for (i32 i = 0; i < g.num_items; ++i) rank_[items_[i]] = i;
  }

  void run(const std::vector<std::vector<i32>>& starts) {
    for (const auto& start : starts) {
      load(start);
      note();
    }
    for (i64 round = 0; !limits_.done() && !found(); ++round) {
      ++limits_.evaluations;  // of the round itself, so that rounds without moves end too
      if (round % 4 == 3) load(starts[random_.below(static_cast<i32>(starts.size()))]);
      else load(best_);
      const double effort = 30.0 * std::exp2(random_.unit() * std::min<i64>(2 + round / 4, 8));
      anneal(static_cast<i64>(effort * g_.num_items), 0.05 * std::exp2(-6 * random_.unit()));
    }
  }
  const std::vector<i32>& best() const { return best_; }
  const Mark& mark() const { return mark_; }
  i64 evaluations() const { return limits_.evaluations; }

 private:
  bool found() const { return mark_.excess == 0 && mark_.value <= limits_.bound; }

  void load(std::vector<i32> of_items) {
    device_ = std::move(of_items);
    nodes_.resize(g_.num_nodes);
    held_.assign(g_.devices, 0);
    for (i32 v = 0; v < g_.num_nodes; ++v) {
      nodes_[v] = device_[g_.item[v]];
      held_[nodes_[v]] += g_.size[v];
    }
    value_ = evaluator_.run(nodes_);
  }
  i64 excess() const {
    i64 sum = 0;
    for (i32 d = 0; d < g_.accelerators; ++d) sum += std::max<i64>(0, held_[d] - g_.memory);
    return sum;
  }
  double score() const {
    if (value_ < 0) return 1e30;
    const double memory = static_cast<double>(std::max<i64>(1, g_.memory));
    const double over = static_cast<double>(excess());
    return static_cast<double>(value_) * scale_ + (over > 0 ? 0.02 + 2 * over / memory : 0.0);
  }
  void note() {
    if (value_ < 0) return;
    const Mark now{excess(), value_};
    if (best_.empty() || now < mark_) best_ = device_, mark_ = now;
  }
  void put(i32 i, i32 d) {
    for (i32 y = g_.item_ptr[i]; y < g_.item_ptr[i + 1]; ++y) {
      const i32 v = g_.members[y];
      held_[nodes_[v]] -= g_.size[v];
      held_[d] += g_.size[v];
      nodes_[v] = d;
    }
    device_[i] = d;
  }
  bool allowed(i32 i, i32 d) const {
    if (d >= g_.accelerators) return true;
    for (i32 y = g_.item_ptr[i]; y < g_.item_ptr[i + 1]; ++y)
      if (!g_.can_accelerate[g_.members[y]]) return false;
    return true;
  }

  void anneal(i64 steps, double hot) {
    if (g_.devices < 2 || g_.num_items == 0) return;
    scale_ = 1.0 / static_cast<double>(std::max<i64>(1, mark_.value));
    double now = score();
    for (i64 step = 0; step < steps; ++step) {
      if ((step & 63) == 0) {
        if (limits_.done() || found()) return;
        temperature_ = hot * std::pow(0.002, static_cast<double>(step) / static_cast<double>(steps));
      }
      if (limits_.spent()) return;
      if (!change()) continue;
      ++limits_.evaluations;
      const i64 before = value_;
      value_ = evaluator_.run(nodes_);
      const double after = score();
      if (after <= now || random_.unit() < std::exp((now - after) / temperature_)) {
        now = after;
        note();
        continue;
      }
      for (auto u = undo_.rbegin(); u != undo_.rend(); ++u) put(u->first, u->second);
      value_ = before;
    }
  }
  i32 neighbour(i32 i) {  // device of a random neighbour, or of anything
    const i32 v = g_.members[g_.item_ptr[i] + random_.below(g_.item_ptr[i + 1] - g_.item_ptr[i])];
    const i32 ins = g_.in_ptr[v + 1] - g_.in_ptr[v], outs = g_.out_ptr[v + 1] - g_.out_ptr[v];
    if (ins + outs == 0 || random_.below(4) == 0) return random_.below(g_.devices);
    const i32 x = random_.below(ins + outs);
    return nodes_[x < ins ? g_.in[g_.in_ptr[v] + x] : g_.out[g_.out_ptr[v] + x - ins]];
  }
  bool change() {
    undo_.clear();
    const i32 i = random_.below(g_.num_items), a = device_[i];
    const i32 kind = random_.below(8);
    if (kind < 2) {  // swap
      const i32 j = random_.below(g_.num_items), b = device_[j];
      if (a == b || !allowed(i, b) || !allowed(j, a)) return false;
      undo_ = {{i, a}, {j, b}};
      put(i, b), put(j, a);
      return true;
    }
    const i32 step = random_.below(2) ? 1 : -1, behind = rank_[i] - step;
    i32 b = neighbour(i);
    if (random_.below(3) == 0 && behind >= 0 && behind < g_.num_items) b = device_[items_[behind]];
    if (a == b) return false;
    i32 length = 1;
    if (kind >= 5)
      while (length < g_.num_items && random_.below(4)) length += 1 + random_.below(length);
    for (i32 at = rank_[i]; at >= 0 && at < g_.num_items && length > 0; at += step) {
      const i32 j = items_[at];
      if (device_[j] != a || !allowed(j, b)) continue;
      undo_.push_back({j, a});
      put(j, b);
      --length;
    }
    return !undo_.empty();
  }

  const BlockGraph& g_;
  Random random_;
  Limits limits_;
  BlockEvaluator evaluator_;
  std::vector<i32> items_, rank_, device_, nodes_, best_;
  std::vector<std::pair<i32, i32>> undo_;
  std::vector<i64> held_;
  i64 value_ = -1;
  double scale_ = 1, temperature_ = 1;
  Mark mark_;
};

}  // namespace devplace_load

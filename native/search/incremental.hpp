// Simulates changes of a placement from where they begin to matter, and gives up on those that are
// too slow. Same step times as simulator/kernel.hpp, which also knows memory.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "clock.hpp"
#include "copies.hpp"
#include "tails.hpp"

namespace devplace {

class Incremental {
 public:
  static constexpr i64 never = Clock::never;

  explicit Incremental(const Core& core) : core_(core), clock_(core), tails_(core, clock_.nodes), copies_(core) {
    marked_.assign(core.num_tasks, 0);
  }

  const std::vector<i32>& device() const { return device_; }
  const std::vector<i64>& priority() const { return priority_; }
  i64 makespan() const { return copies_.batch_ns() + makespan_; }
  i64 num_events() const { return clock_.num_events; }

  // Takes a placement as the one that changes start from, with its critical-path priorities.
  void reset(const std::vector<i32>& device) {
    clock_.in_turn = false;
    device_ = device;
    moves_.clear();
    clock_.load.assign(core_.num_devices, 0);
    for (i32 v = 0; v < core_.num_tasks; ++v) {
      clock_.nodes[v].device = device_[v];
      clock_.nodes[v].work = work(v, device_[v]);
      clock_.load[device_[v]] += clock_.nodes[v].work;
    }
    copies_.set(device_);
    tails_.set(device_);
    use_tails();
    record(-1);
  }

  // Takes other priorities; with `in_turn` devices keep to them, and wait.
  void use(const std::vector<i64>& priority, bool in_turn) {
    priority_ = priority;
    clock_.in_turn = in_turn;
    set_ranks();
    record(-1);
  }
  bool in_turn() const { return clock_.in_turn; }

  // Step time if these tasks moved, `never` if it would be above `cutoff`. The change is kept in
  // mind until `accept` or `reject`.
  // With `fresh`, tasks get the critical-path priorities of the new placement, and no device waits
  // for a turn; then the step is simulated from its start.
  i64 try_move(const std::vector<std::pair<i32, i32>>& moves, i64 cutoff, bool fresh = false) {
    moves_.clear();
    moved_to_.clear();
    for (const auto& [task, target] : moves) {
      if (device_[task] == target) continue;
      moves_.push_back({task, device_[task]});
      moved_to_.push_back(target);
    }
    is_fresh_ = fresh;
    from_ = fresh || clock_.in_turn ? 0 : affected_from();
    for (std::size_t k = 0; k < moves_.size(); ++k) place(moves_[k].first, moved_to_[k]);
    tails_.update(moves_, device_);
    if (fresh) {
      hold_order();
      clock_.in_turn = false;
      use_tails();
    }
    const i64 found = resume(cutoff - copies_.batch_ns());
    return found == never ? never : copies_.batch_ns() + found;
  }

  // Step time if `task`, with all before it that now come later, came before `other`; `never` if
  // that is impossible, changes nothing or takes longer than `cutoff`. Kept in mind as a move.
  i64 try_earlier(i32 task, i32 other, i64 cutoff) {
    const Ranks& ranks = clock_.ranks;
    const i32 from = ranks.of(other), to = ranks.of(task);
    moves_.clear();
    tails_.update(moves_, device_);  // nothing moves: `reject` has nothing to undo there
    earlier_.assign(1, task);
    bool is_possible = from < to;
    for (std::size_t k = 0; k < earlier_.size() && is_possible; ++k) {
      marked_[earlier_[k]] = 1;
      for (i32 j = core_.in_ptr[earlier_[k]]; j < core_.in_ptr[earlier_[k] + 1]; ++j) {
        const i32 u = core_.in_task[j];
        if (ranks.of(u) < from || core_.is_source[u] || marked_[u]) continue;
        is_possible &= u != other;
        marked_[u] = 1;
        earlier_.push_back(u);
      }
    }
    if (is_possible) {
      held_priority_.resize(core_.num_tasks);
      i64 place = core_.num_tasks;
      for (i32 rank = 0; rank < from; ++rank) held_priority_[ranks.task(rank)] = place--;
      for (i32 rank = from; rank <= to; ++rank)
        if (marked_[ranks.task(rank)]) held_priority_[ranks.task(rank)] = place--;
      for (i32 rank = from; rank < core_.num_tasks; ++rank)
        if (rank > to || !marked_[ranks.task(rank)]) held_priority_[ranks.task(rank)] = place--;
    }
    for (const i32 v : earlier_) marked_[v] = 0;
    if (!is_possible) return never;
    hold_order();
    is_fresh_ = true;
    from_ = 0;
    set_ranks();
    const i64 found = resume(cutoff - copies_.batch_ns());
    return found == never ? never : copies_.batch_ns() + found;
  }

  void reject() {
    for (const auto& [task, old] : moves_) place(task, old);
    tails_.undo();
    moves_.clear();
    if (!is_fresh_) return;
    priority_.swap(held_priority_);
    clock_.ranks.swap(held_ranks_);
    clock_.in_turn = held_in_turn_;
    copy_ranks();
    is_fresh_ = false;
  }

  // Keeps the change, which must have been simulated to its end.
  void accept() {
    is_fresh_ = false;
    const int k = snapshot_before(from_);
    std::vector<i64> change(core_.num_devices, 0);
    for (const auto& [task, old] : moves_) {
      change[old] -= work(task, old);
      change[device_[task]] += clock_.nodes[task].work;
    }
    for (int j = 0; j <= k; ++j)
      for (i32 d = 0; d < core_.num_devices; ++d) snapshots_[j].state.left[d] += change[d];
    moves_.clear();
    record(k);
  }

  // Tasks of the chain that decides the step time, last first.
  void critical_chain(std::vector<i32>& chain) const {
    const Clock::Record& known = clock_.record;
    chain.clear();
    i32 task = -1;
    for (i32 v = 0; v < core_.num_tasks; ++v)
      if (!core_.is_source[v] && (task < 0 || known.finish[v] > known.finish[task])) task = v;
    while (task >= 0 && !core_.is_source[task]) {
      chain.push_back(task);
      i32 best = known.before[task];
      i64 when = best >= 0 ? known.finish[best] : -1;
      const i32 d = device_[task];
      for (i32 j = core_.in_ptr[task]; j < core_.in_ptr[task + 1]; ++j) {
        const i32 u = core_.in_task[j];
        const i64 there =
            device_[u] == d ? known.finish[u] : known.arrival[first_reader(core_.in_carrier[j], d)];
        if (there > when) {
          best = u;
          when = there;
        }
      }
      task = best;
    }
  }

 private:
  static constexpr int most_snapshots = 16;

  i64 work(i32 task, i32 device) const { return core_.is_source[task] ? 0 : core_.duration(task, device); }

  void place(i32 task, i32 device) {
    copies_.move(task, device_[task], device);
    Clock::Node& node = clock_.nodes[task];
    clock_.load[node.device] -= node.work;
    device_[task] = node.device = device;
    node.work = work(task, device);
    clock_.load[device] += node.work;
  }

  // Where a carrier's arrival on a device is kept.
  i32 first_reader(i32 carrier, i32 device) const {
    i32 j = core_.cons_ptr[carrier];
    while (device_[core_.cons[j]] != device) ++j;
    return j;
  }

  // Remembers order and rule for `reject`; `priority_` becomes what was held before.
  void hold_order() {
    held_priority_.swap(priority_);
    held_ranks_.swap(clock_.ranks);
    held_in_turn_ = clock_.in_turn;
  }

  // Critical-path priorities.
  void use_tails() {
    priority_.resize(core_.num_tasks);
    for (i32 v = 0; v < core_.num_tasks; ++v) priority_[v] = clock_.nodes[v].tail;
    set_ranks();
  }
  void set_ranks() {
    clock_.ranks.set(priority_, spare_);
    copy_ranks();
  }
  void copy_ranks() {
    for (i32 v = 0; v < core_.num_tasks; ++v) clock_.nodes[v].rank = clock_.ranks.of(v);
  }

  int snapshot_before(i64 instant) const {
    int k = num_snapshots_ - 1;
    while (k >= 0 && snapshots_[k].state.now >= instant) --k;
    return k;
  }

  // Simulates from a snapshot, or from the start (-1), and takes snapshots on the way.
  void record(int k) {
    const i32 every = std::max(1, core_.num_tasks / most_snapshots);
    clock_.begin<true>(k < 0 ? nullptr : &snapshots_[k]);
    num_snapshots_ = k + 1;
    i32 next = k < 0 ? 0 : clock_.state.started + every;
    do {
      if (clock_.state.started < next) continue;
      if (static_cast<std::size_t>(num_snapshots_) == snapshots_.size()) snapshots_.emplace_back();
      clock_.keep_state(snapshots_[num_snapshots_++]);
      next = clock_.state.started + every;
    } while (clock_.instant<true>(never));
    makespan_ = clock_.state.makespan;
  }

  i64 resume(i64 cutoff) {
    const int k = snapshot_before(from_);
    clock_.begin<false>(k < 0 ? nullptr : &snapshots_[k]);
    if (k >= 0)
      for (const auto& [task, old] : moves_) {
        clock_.state.left[old] -= work(task, old);
        clock_.state.left[device_[task]] += clock_.nodes[task].work;
      }
    while (clock_.instant<false>(cutoff)) {
    }
    // Ops that began before the snapshot were not compared with this cutoff.
    return clock_.state.makespan <= cutoff ? clock_.state.makespan : never;
  }

  // First instant at which anything differs once `moves_` are made (devices still as before).
  i64 affected_from() {
    for (std::size_t k = 0; k < moves_.size(); ++k) marked_[moves_[k].first] = static_cast<i32>(k) + 1;
    auto after = [&](i32 v) { return marked_[v] ? moved_to_[marked_[v] - 1] : device_[v]; };
    i64 from = never;
    for (const auto& [v, old] : moves_) {
      if (core_.is_source[v]) {
        for (i32 j = core_.cons_ptr[core_.out_ptr[v]]; j < core_.cons_ptr[core_.out_ptr[v + 1]]; ++j) {
          const i32 r = core_.cons[j];
          if (device_[r] != old || after(r) != after(v)) from = 0;
        }
        continue;
      }
      from = std::min(from, clock_.record.ready_at[v]);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) {
        const i32 u = core_.in_task[j];
        if (device_[u] != old || after(u) != after(v)) from = std::min(from, clock_.record.finish[u]);
      }
    }
    for (const auto& [v, old] : moves_) marked_[v] = 0;
    return from;
  }

  const Core& core_;
  Clock clock_;
  Tails tails_;
  Copies copies_;
  Ranks held_ranks_;
  std::vector<Clock::Snapshot> snapshots_;
  int num_snapshots_ = 0;
  bool is_fresh_ = false, held_in_turn_ = false;
  i64 makespan_ = 0, from_ = 0;
  std::vector<i32> device_, marked_, moved_to_, spare_, earlier_;
  std::vector<i64> priority_, held_priority_;
  std::vector<std::pair<i32, i32>> moves_;
};

}  // namespace devplace

// Simulated annealing of placements: which device for which group of tasks.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <vector>

#include "incremental.hpp"

namespace devplace {

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15ull + 0x1234567ull) {}
  std::uint64_t bits() {
    std::uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1.0p-53; }
  i32 below(i32 n) { return static_cast<i32>(uniform() * n); }

 private:
  std::uint64_t state_;
};

// What all chains share.
struct Space {
  const Core* core = nullptr;
  i32 num_groups = 0, num_classes = 0;
  std::vector<i32> group_ptr, group_tasks;  // tasks of each group
  std::vector<i32> task_group;
  std::vector<i32> target;                  // [G, D]: the device that a wish becomes
  std::vector<i32> class_ptr, class_groups; // groups of each class, classes in model order
  std::vector<i32> group_class;
  std::vector<double> class_weight;         // by work, sums to 1
  std::vector<i32> devices;                 // that classes may go to
  std::vector<i64> limit_bytes, pool_limit_bytes;
  bool tracks_memory = false;
};

// Parts of all moves; see placers/annealing.py.
struct Moves {
  double swap_share = 0, run_share = 0, pair_share = 0, part_share = 0, beside_share = 0, fresh_share = 0;
  double order_share = 0;
};

struct Settings {
  Moves moves;
  double temperature = 0, critical_share = 0;
  i64 most_evaluations = 0, patience = 0;
  i64 least_ns = 0;  // no placement that fits takes less
  double seconds = 0;
  std::uint64_t seed = 0;
  const std::atomic<bool>* stop = nullptr;  // ends the chain once true
};

struct Found {
  std::vector<i32> groups;
  std::vector<i64> priority;
  bool in_turn = false;  // devices keep to the priorities, and wait
  i64 step = 0, overflow = 0, evaluations = 0;
};

// One chain; its time counts from when it was made.
class Chain {
 public:
  using Timer = std::chrono::steady_clock;

  Chain(const Space& space, const Settings& settings)
      : space_(space), core_(*space.core), settings_(settings), begin_(Timer::now()), random_(settings.seed),
        incremental_(core_), simulator_(core_) {}

  Found run(const i32* groups, const i64* priority, bool in_turn) {
    groups_.assign(groups, groups + space_.num_groups);
    std::vector<i32> device(core_.num_tasks);
    for (i32 v = 0; v < core_.num_tasks; ++v) device[v] = groups_[space_.task_group[v]];
    start(device, priority, in_turn);
    keep_best();
    refocus();
    i64 stale = 0;
    while (evaluations_ < settings_.most_evaluations && stale < settings_.patience && !is_optimal() &&
           !is_late()) {
      const double temperature = best_value_ * settings_.temperature * std::exp(-6.0 * spent());
      const double bar = value_ - temperature * std::log(std::max(1e-300, random_.uniform()));
      ++stale;
      if (!propose()) continue;
      const double found = evaluate(bar);
      if (found > bar) {
        undo();
        continue;
      }
      const bool is_other = found != value_;
      value_ = found;
      incremental_.accept();
      if (value_ < best_value_ * (1 - 1e-6)) {
        keep_best();
        stale = 0;
      }
      if (is_other) refocus();
    }
    best_.evaluations = evaluations_;
    return best_;
  }

 private:
  bool is_optimal() const { return best_.overflow == 0 && best_.step <= settings_.least_ns; }

  // With critical-path priorities, or with the given ones if these are better.
  void start(const std::vector<i32>& device, const i64* given, bool in_turn) {
    ++evaluations_;
    incremental_.reset(device);
    simulate();
    if (given == nullptr) return;
    const double own = value_;
    const std::vector<i64> path = incremental_.priority();
    incremental_.use(std::vector<i64>(given, given + core_.num_tasks), in_turn);
    simulate();
    if (value_ < own) return;
    incremental_.use(path, false);
    simulate();
  }
  void simulate() {
    step_ = incremental_.makespan();
    value_ = value();
  }

  // Of what was simulated last: its step time, and more where it does not fit.
  double value() {
    overflow_ = 0;
    if (!space_.tracks_memory) return static_cast<double>(step_);
    const i64* priority = incremental_.priority().data();
    const i64* turn = incremental_.in_turn() ? priority : nullptr;
    simulator_.run<true, false>(incremental_.device().data(), priority, turn, outcome_);
    i64 smallest = Incremental::never;
    for (std::size_t d = 0; d < space_.limit_bytes.size(); ++d) {
      overflow_ += std::max<i64>(0, outcome_.peak[d] - space_.limit_bytes[d]);
      smallest = std::min(smallest, space_.limit_bytes[d]);
    }
    for (std::size_t p = 0; p < space_.pool_limit_bytes.size(); ++p)
      overflow_ += std::max<i64>(0, outcome_.pool_peak[p] - space_.pool_limit_bytes[p]);
    const double share = static_cast<double>(overflow_) / static_cast<double>(std::max<i64>(1, smallest));
    return static_cast<double>(step_) * (1 + 2 * share + (overflow_ > 0 ? 0.05 : 0));
  }

  // Memory is looked at only where the step alone would be accepted.
  double evaluate(double bar) {
    ++evaluations_;
    const i64 cutoff = static_cast<i64>(std::min(bar, 9e18));
    if (is_order_) return with_step(incremental_.try_earlier(task_, other_, cutoff));
    moves_.clear();
    for (const auto& [group, old] : moved_)
      for (i32 j = space_.group_ptr[group]; j < space_.group_ptr[group + 1]; ++j)
        moves_.push_back({space_.group_tasks[j], groups_[group]});
    const bool fresh = random_.uniform() < settings_.moves.fresh_share;
    return with_step(incremental_.try_move(moves_, cutoff, fresh));
  }
  double with_step(i64 step) {
    if (step == Incremental::never) return 1e300;
    step_ = step;
    return value();
  }

  void undo() {
    for (auto it = moved_.rbegin(); it != moved_.rend(); ++it) groups_[it->first] = it->second;
    incremental_.reject();
  }

  void keep_best() {
    best_value_ = value_;
    best_.groups = groups_;
    best_.priority = incremental_.priority();
    best_.in_turn = incremental_.in_turn();
    best_.step = step_;
    best_.overflow = overflow_;
  }

  // The critical path of the present state, and what it says of classes.
  void refocus() {
    incremental_.critical_chain(chain_);
    const std::size_t C = space_.num_classes;
    sums_.assign(C, 0);
    double total = 0;
    for (const i32 v : chain_) {
      const double length = static_cast<double>(duration(v));
      sums_[space_.group_class[space_.task_group[v]]] += length;
      total += length;
    }
    double sum = 0;
    for (std::size_t c = 0; c < C; ++c) {
      sum += 0.4 * space_.class_weight[c] + 0.2 / static_cast<double>(C) +
             (total > 0 ? 0.4 * sums_[c] / total : 0);
      sums_[c] = sum;
    }
  }

  i64 duration(i32 v) const {
    const i32 d = groups_[space_.task_group[v]];
    return core_.duration_ns[static_cast<std::size_t>(v) * core_.num_devices + d];
  }

  i32 some_class() {
    const double u = random_.uniform() * sums_.back();
    return static_cast<i32>(std::min<std::size_t>(
        std::upper_bound(sums_.begin(), sums_.end(), u) - sums_.begin(), sums_.size() - 1));
  }
  i32 some_device() { return space_.devices[random_.below(static_cast<i32>(space_.devices.size()))]; }

  void move_group(i32 group, i32 wish) {
    const i32 to = space_.target[static_cast<std::size_t>(group) * core_.num_devices + wish];
    if (groups_[group] == to) return;
    moved_.push_back({group, groups_[group]});
    groups_[group] = to;
  }
  void move_class(i32 c, i32 wish) {
    for (i32 j = space_.class_ptr[c]; j < space_.class_ptr[c + 1]; ++j) move_group(space_.class_groups[j], wish);
  }
  i32 device_of_class(i32 c) const { return groups_[space_.class_groups[space_.class_ptr[c]]]; }

  // Changes groups, or says which task comes before which; false if nothing came of it.
  bool propose() {
    moved_.clear();
    const Moves& moves = settings_.moves;
    is_order_ = random_.uniform() < moves.order_share;
    if (is_order_) return propose_order();
    const double kind = random_.uniform();
    if (!chain_.empty() && random_.uniform() < settings_.critical_share) {
      move_critical();
    } else if (kind < moves.swap_share) {
      swap_classes();
    } else if (kind < moves.swap_share + moves.run_share) {
      move_classes_in_a_row();
    } else if (kind < moves.swap_share + moves.run_share + moves.part_share) {
      move_part();
    } else {
      move_some_class();
      if (kind < moves.swap_share + moves.run_share + moves.part_share + moves.pair_share) move_some_class();
    }
    return !moved_.empty();
  }

  // A task of the critical path that waited for its device, and one that it waited for.
  bool propose_order() {
    const i32 last = static_cast<i32>(chain_.size()) - 1;
    for (int tries = 0; tries < 8 && last > 0; ++tries) {
      i32 k = random_.below(last);
      if (!waits_for_device(k)) continue;
      task_ = chain_[k++];
      while (k < last && waits_for_device(k) && random_.uniform() < 0.5) ++k;
      other_ = chain_[k];
      return true;
    }
    return false;
  }
  bool waits_for_device(i32 k) const {
    const i32 v = chain_[k], u = chain_[k + 1];
    if (groups_[space_.task_group[v]] != groups_[space_.task_group[u]]) return false;
    const auto first = core_.in_task.begin() + core_.in_ptr[v], end = core_.in_task.begin() + core_.in_ptr[v + 1];
    return std::find(first, end, u) == end;
  }

  void swap_classes() {
    const i32 a = some_class(), b = some_class();
    const i32 to_a = device_of_class(b), to_b = device_of_class(a);
    if (a == b) return;
    move_class(a, to_a);
    move_class(b, to_b);
  }

  void move_classes_in_a_row() {
    const i32 C = space_.num_classes, length = 2 + random_.below(std::max(1, C / 4));
    const i32 first = random_.below(C), to = some_device();
    for (i32 c = first; c < std::min(C, first + length); ++c) move_class(c, to);
  }

  // All that a device has of the model before or behind some class goes to another device.
  void move_part() {
    const i32 c = some_class(), here = device_of_class(c), to = some_device();
    const bool is_rest = random_.uniform() < 0.5;
    const i32 first = is_rest ? c : 0, end = is_rest ? space_.num_classes : c + 1;
    for (i32 k = first; k < end; ++k)
      if (device_of_class(k) == here) move_class(k, to);
  }

  void move_some_class() {
    const i32 c = some_class();
    move_class(c, random_.uniform() < settings_.moves.beside_share ? device_beside(c) : some_device());
  }

  // Where a task is that gives to, or takes from, a random task of this class.
  i32 device_beside(i32 c) {
    const i32 here = device_of_class(c);
    for (int tries = 0; tries < 4; ++tries) {
      const i32 group = pick(space_.class_groups, space_.class_ptr[c], space_.class_ptr[c + 1]);
      const i32 v = pick(space_.group_tasks, space_.group_ptr[group], space_.group_ptr[group + 1]);
      const i32 inputs = core_.in_ptr[v + 1] - core_.in_ptr[v];
      const i32 first = core_.cons_ptr[core_.out_ptr[v]], readers = core_.cons_ptr[core_.out_ptr[v + 1]] - first;
      if (inputs + readers == 0) continue;
      const i32 k = random_.below(inputs + readers);
      const i32 other = k < inputs ? core_.in_task[core_.in_ptr[v] + k] : core_.cons[first + k - inputs];
      const i32 there = groups_[space_.task_group[other]];
      if (there != here) return there;
    }
    return some_device();
  }
  i32 pick(const std::vector<i32>& from, i32 first, i32 last) { return from[first + random_.below(last - first)]; }

  // A run of the critical path goes to the device of its neighbour there, or to any.
  void move_critical() {
    const i32 n = static_cast<i32>(chain_.size()), first = random_.below(n);
    i32 length = 1;
    if (random_.uniform() < 0.7)
      while (length < n && random_.uniform() < 0.7) ++length;
    const i32 here = groups_[space_.task_group[chain_[first]]];
    i32 to = some_device();
    if (random_.uniform() < 0.7) {
      const bool ahead = random_.uniform() < 0.5;
      const i32 beside = ahead ? std::min(n - 1, first + length) : std::max(0, first - 1);
      const i32 there = groups_[space_.task_group[chain_[beside]]];
      if (there != here) to = there;
    }
    for (i32 k = first; k < std::min(n, first + length); ++k) move_group(space_.task_group[chain_[k]], to);
  }

  double seconds() const { return std::chrono::duration<double>(Timer::now() - begin_).count(); }
  bool is_late() {
    if (settings_.stop && settings_.stop->load(std::memory_order_relaxed)) return true;
    if (settings_.seconds <= 0) return false;
    if (tries_++ % 8 == 0) now_ = seconds();
    return now_ >= settings_.seconds;
  }
  double spent() const {
    const double by_count =
        static_cast<double>(evaluations_) / static_cast<double>(std::max<i64>(1, settings_.most_evaluations));
    return std::min(1.0, settings_.seconds > 0 ? std::max(by_count, now_ / settings_.seconds) : by_count);
  }

  const Space& space_;
  const Core& core_;
  const Settings settings_;
  const Timer::time_point begin_;
  Random random_;
  Incremental incremental_;
  Simulator simulator_;
  Outcome outcome_;
  Found best_;
  double value_ = 0, best_value_ = 0, now_ = 0;
  i64 step_ = 0, overflow_ = 0, evaluations_ = 0, tries_ = 0;
  bool is_order_ = false;
  i32 task_ = 0, other_ = 0;
  std::vector<i32> groups_, chain_;
  std::vector<double> sums_;
  std::vector<std::pair<i32, i32>> moved_, moves_;
};

}  // namespace devplace

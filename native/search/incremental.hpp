// Simulates changes of a placement from where they begin to matter, and gives up on those that are
// too slow. Same step times as simulator/kernel.hpp; devices with one stream only, no memory.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "../simulator/kernel.hpp"

namespace devplace {

class Incremental {
 public:
  static constexpr i64 never = std::numeric_limits<i64>::max();

  explicit Incremental(const Core& core) : core_(core) {
    const std::size_t N = core.num_tasks;
    dirty_.assign(N, 0);
    marked_.assign(N, 0);
    longest_.assign(N, 0);
    ready_at_.assign(N, 0);
    finish_.assign(N, 0);
    arrival_.assign(core.carrier_bytes.size() * static_cast<std::size_t>(core.num_devices), 0);
  }

  const std::vector<i32>& device() const { return device_; }
  const std::vector<i64>& priority() const { return priority_; }
  i64 makespan() const { return makespan_; }
  i64 num_runs() const { return num_runs_; }
  i64 num_events() const { return num_events_; }

  // Takes a placement as the one that changes start from, with its critical-path priorities, or
  // with the given ones if these make the step shorter.
  void reset(const std::vector<i32>& device, const std::vector<i64>* given) {
    device_ = device;
    longest_.resize(core_.num_tasks);
    critical_path(core_, device_.data(), longest_.data());
    settle(given, never);
  }

  // Step time if these tasks moved, `never` if it would be above `cutoff`. The change is kept in
  // mind until `accept` or `reject`.
  // With `fresh`, tasks get the critical-path priorities of the new placement; then the step is
  // simulated from its start.
  i64 try_move(const std::vector<std::pair<i32, i32>>& moves, i64 cutoff, bool fresh = false) {
    moves_.clear();
    for (const auto& [task, target] : moves)
      if (device_[task] != target) moves_.push_back({task, device_[task]});
    moved_to_.clear();
    for (const auto& [task, target] : moves)
      if (device_[task] != target) moved_to_.push_back(target);
    if (moves_.empty()) return makespan_ <= cutoff ? makespan_ : never;
    const i64 from = fresh ? 0 : affected_from();
    for (std::size_t k = 0; k < moves_.size(); ++k) device_[moves_[k].first] = moved_to_[k];
    update_longest();
    is_fresh_ = fresh;
    if (fresh) {
      held_priority_.swap(priority_);
      priority_ = longest_;
    }
    return resume(from, cutoff);
  }

  void reject() {
    for (const auto& [task, old] : moves_) device_[task] = old;
    for (auto it = changed_.rbegin(); it != changed_.rend(); ++it) longest_[it->first] = it->second;
    moves_.clear();
    changed_.clear();
    if (is_fresh_) priority_.swap(held_priority_);
    is_fresh_ = false;
  }

  // Keeps the change; priorities become critical-path ones where that is no slower.
  void accept() {
    moves_.clear();
    changed_.clear();
    if (is_fresh_) {
      is_fresh_ = false;
      makespan_ = record();
      return;
    }
    const std::vector<i64> old = priority_;
    settle(&old, state_.makespan);
  }

  // Tasks of the chain that decides the step time, last first.
  void critical_chain(std::vector<i32>& chain) const {
    chain.clear();
    i32 task = -1;
    for (i32 v = 0; v < core_.num_tasks; ++v)
      if (!core_.is_source[v] && (task < 0 || finish_[v] > finish_[task])) task = v;
    while (task >= 0 && !core_.is_source[task]) {
      chain.push_back(task);
      i32 best = before_[task];
      i64 when = best >= 0 ? finish_[best] : -1;
      const i32 d = device_[task];
      for (i32 j = core_.in_ptr[task]; j < core_.in_ptr[task + 1]; ++j) {
        const i32 u = core_.in_task[j];
        const i64 there = device_[u] == d ? finish_[u] : arrival_[at(core_.in_carrier[j], d)];
        if (there > when) {
          best = u;
          when = there;
        }
      }
      task = best;
    }
  }

 private:
  struct State {
    i64 now = 0, makespan = 0;
    std::vector<i64> lane_free, channel_free, slot_finish, debt, left;
    std::vector<i32> slot_task, missing;
    std::vector<Heap<ReadyTask, ReadyFirst>> ready;
    Heap<Arrival, ArrivalFirst> arrivals;
  };
  static constexpr int most_snapshots = 24;

  std::size_t at(i32 carrier, i32 device) const {
    return static_cast<std::size_t>(carrier) * core_.num_devices + device;
  }
  i64 duration(i32 v, i32 d) const {
    return core_.duration_ns[static_cast<std::size_t>(v) * core_.num_devices + d];
  }

  // Critical-path priorities, or the given ones where these make the step shorter; `known` is the
  // step time with the given ones if it is known.
  void settle(const std::vector<i64>* given, i64 known) {
    if (given != nullptr && known == never) {
      priority_ = *given;
      known = record();
    }
    priority_ = longest_;
    makespan_ = record();
    if (given == nullptr || makespan_ <= known) return;
    priority_ = *given;
    makespan_ = record();
  }

  // The whole step, with snapshots on the way.
  i64 record() {
    ++num_runs_;
    num_snapshots_ = 0;
    const i64 every = std::max<i64>(1, core_.num_tasks / most_snapshots);
    before_.assign(core_.num_tasks, -1);
    last_.assign(core_.num_devices, -1);
    prepare();
    i64 next = 0, done = 0;
    for (;;) {
      if (done >= next) {
        if (static_cast<std::size_t>(num_snapshots_) == snapshots_.size()) snapshots_.emplace_back();
        snapshots_[num_snapshots_++] = state_;
        next = done + every;
      }
      if (!instant<true>(never, done)) break;
    }
    return state_.makespan;
  }

  i64 resume(i64 from, i64 cutoff) {
    ++num_runs_;
    int k = num_snapshots_ - 1;
    while (k >= 0 && snapshots_[k].now >= from) --k;
    if (k < 0) {
      prepare();
    } else {
      state_ = snapshots_[k];
      for (const auto& [task, old] : moves_) {
        state_.left[old] -= duration(task, old);
        state_.left[device_[task]] += duration(task, device_[task]);
      }
    }
    i64 done = 0;
    while (instant<false>(cutoff, done)) {
    }
    // Ops that began before the snapshot were not compared with this cutoff.
    return state_.makespan <= cutoff ? state_.makespan : never;
  }

  // Events of one instant; false at the end, or (makespan = never) above the cutoff.
  template <bool keep>
  bool instant(i64 cutoff, i64& done) {
    State& s = state_;
    for (i32 d = 0; d < core_.num_devices; ++d) {
      if (s.slot_finish[d] != never || s.ready[d].empty()) continue;
      const i32 v = s.ready[d].top().task;
      s.ready[d].pop();
      const i64 own = duration(v, d), end = s.now + own + s.debt[d];
      s.debt[d] = 0;
      s.left[d] -= own;
      s.makespan = std::max(s.makespan, end);
      ++done;
      ++num_events_;
      if constexpr (keep) {
        finish_[v] = end;
        before_[v] = last_[d];
        last_[d] = v;
      } else if (s.now + longest_[v] > cutoff || end + s.left[d] > cutoff) {
        s.makespan = never;
        return false;
      }
      s.slot_finish[d] = end;
      s.slot_task[d] = v;
    }
    i64 next = s.arrivals.empty() ? never : s.arrivals.top().time;
    for (const i64 end : s.slot_finish) next = std::min(next, end);
    if (next == never) return false;
    s.now = next;
    finished_.clear();
    for (i32 d = 0; d < core_.num_devices; ++d) {
      if (s.slot_finish[d] != s.now) continue;
      finished_.push_back({priority_[s.slot_task[d]], s.slot_task[d]});
      s.slot_finish[d] = never;
    }
    if (finished_.size() > 1) std::sort(finished_.begin(), finished_.end(), ReadyFirst{});
    for (const ReadyTask& item : finished_) finish(item.task);
    while (!s.arrivals.empty() && s.arrivals.top().time == s.now) {
      const Arrival a = s.arrivals.top();
      s.arrivals.pop();
      arrive(a);
    }
    return true;
  }

  void prepare() {
    const i32 N = core_.num_tasks, D = core_.num_devices;
    State& s = state_;
    s.now = s.makespan = 0;
    s.missing.resize(N);
    s.left.assign(D, 0);
    for (i32 v = 0; v < N; ++v) {
      s.missing[v] = core_.in_ptr[v + 1] - core_.in_ptr[v];
      if (!core_.is_source[v]) s.left[device_[v]] += duration(v, device_[v]);
    }
    s.channel_free.assign(core_.num_channels, 0);
    s.lane_free.assign(2 * static_cast<std::size_t>(D) * D, 0);
    s.slot_finish.assign(D, never);
    s.slot_task.assign(D, -1);
    s.debt.assign(D, 0);
    s.ready.resize(D);
    for (auto& heap : s.ready) heap.clear();
    s.arrivals.clear();
    stamp_.resize(D, -1);
    finished_.clear();
    for (i32 v = 0; v < N; ++v)
      if (core_.is_source[v]) finished_.push_back({priority_[v], v});
    std::sort(finished_.begin(), finished_.end(), ReadyFirst{});
    const std::vector<ReadyTask> sources = finished_;
    for (const ReadyTask& item : sources) {
      finish_[item.task] = 0;
      finish(item.task);
    }
    for (i32 v = 0; v < N; ++v)
      if (!core_.is_source[v] && core_.in_ptr[v + 1] == core_.in_ptr[v]) make_ready(v);
  }

  void make_ready(i32 v) {
    if (recording()) ready_at_[v] = state_.now;
    state_.ready[device_[v]].push({priority_[v], v});
  }
  bool recording() const { return moves_.empty(); }

  void one_input_less(i32 v) {
    if (--state_.missing[v] == 0) make_ready(v);
  }

  void finish(i32 v) {
    const i32 d = device_[v];
    for (i32 x = core_.out_ptr[v]; x < core_.out_ptr[v + 1]; ++x) {
      ++tick_;
      for (i32 j = core_.cons_ptr[x]; j < core_.cons_ptr[x + 1]; ++j) {
        const i32 reader = core_.cons[j], e = device_[reader];
        if (e == d) {
          one_input_less(reader);
        } else if (stamp_[e] != tick_) {
          stamp_[e] = tick_;
          send(x, d, e);
        }
      }
    }
  }

  void send(i32 x, i32 d, i32 e) {
    State& s = state_;
    const i32 pair = d * core_.num_devices + e;
    const i32 first = core_.channel_ptr[pair], last = core_.channel_ptr[pair + 1];
    const std::size_t priced = core_.priced(pair, x);
    const u8 queues = core_.queues[priced];
    i64 end = s.now + core_.transfer_ns[priced];
    if (queues != 2) {  // 2: waits for nothing
      i64& lane = s.lane_free[2 * static_cast<std::size_t>(pair) + queues];
      i64 begin = std::max(s.now, lane);
      if (queues)
        for (i32 c = first; c < last; ++c) begin = std::max(begin, s.channel_free[core_.channel[c]]);
      lane = end = begin + core_.transfer_ns[priced];
      for (i32 c = first; c < last; ++c) {
        i64& free = s.channel_free[core_.channel[c]];
        free = std::max(free, begin) + core_.channel_ns[priced];
      }
    }
    s.debt[d] += core_.send_ns[priced];
    const i64 when = end + core_.latency_ns[pair];
    if (recording()) arrival_[at(x, e)] = when;
    s.arrivals.push({when, x, e});
  }

  void arrive(const Arrival& a) {
    const i32 d = device_[core_.carrier_task[a.carrier]];
    state_.debt[a.device] +=
        core_.receive_ns[core_.priced(d * core_.num_devices + a.device, a.carrier)];
    for (i32 j = core_.cons_ptr[a.carrier]; j < core_.cons_ptr[a.carrier + 1]; ++j)
      if (device_[core_.cons[j]] == a.device) one_input_less(core_.cons[j]);
  }

  // First instant at which anything differs once `moves_` are made (devices still as before).
  i64 affected_from() {
    for (std::size_t k = 0; k < moves_.size(); ++k) marked_[moves_[k].first] = static_cast<i32>(k) + 1;
    auto after = [&](i32 v) { return marked_[v] ? moved_to_[marked_[v] - 1] : device_[v]; };
    i64 from = never;
    for (const auto& [v, old] : moves_) {
      if (core_.is_source[v]) {
        for (i32 x = core_.out_ptr[v]; x < core_.out_ptr[v + 1]; ++x)
          for (i32 j = core_.cons_ptr[x]; j < core_.cons_ptr[x + 1]; ++j) {
            const i32 r = core_.cons[j];
            if (device_[r] != old || after(r) != after(v)) from = 0;
          }
        continue;
      }
      from = std::min(from, ready_at_[v]);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) {
        const i32 u = core_.in_task[j];
        if (device_[u] != old || after(u) != after(v)) from = std::min(from, finish_[u]);
      }
    }
    for (const auto& [v, old] : moves_) marked_[v] = 0;
    return from;
  }

  // Longest paths after `moves_`: only what they touch, upwards.
  void update_longest() {
    changed_.clear();
    i32 top = -1;
    auto mark = [&](i32 v) {
      dirty_[v] = 1;
      top = std::max(top, v);
    };
    for (const auto& [v, old] : moves_) {
      mark(v);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) mark(core_.in_task[j]);
    }
    for (i32 v = top; v >= 0; --v) {
      if (!dirty_[v]) continue;
      dirty_[v] = 0;
      const i64 length = length_of(v);
      if (length == longest_[v]) continue;
      changed_.push_back({v, longest_[v]});
      longest_[v] = length;
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) dirty_[core_.in_task[j]] = 1;
    }
  }

  i64 length_of(i32 v) const {
    const i32 D = core_.num_devices, d = device_[v];
    i64 tail = 0;
    for (i32 x = core_.out_ptr[v]; x < core_.out_ptr[v + 1]; ++x) {
      for (i32 j = core_.cons_ptr[x]; j < core_.cons_ptr[x + 1]; ++j) {
        const i32 c = core_.cons[j], e = device_[c];
        i64 way = longest_[c];
        if (e != d) way += core_.transfer(d * D + e, x) + core_.latency_ns[d * D + e];
        tail = std::max(tail, way);
      }
    }
    return duration(v, d) + tail;
  }

  const Core& core_;
  State state_;
  std::vector<State> snapshots_;
  int num_snapshots_ = 0;
  i64 makespan_ = 0, num_runs_ = 0, num_events_ = 0, tick_ = 0;
  std::vector<i32> device_, before_, last_, marked_, moved_to_;
  std::vector<i64> priority_, longest_, ready_at_, finish_, arrival_, stamp_;
  std::vector<u8> dirty_;
  std::vector<i64> held_priority_;
  bool is_fresh_ = false;
  std::vector<std::pair<i32, i32>> moves_;
  std::vector<std::pair<i32, i64>> changed_;
  std::vector<ReadyTask> finished_;
};

}  // namespace devplace

// Simulates changes of a placement from where they begin to matter, and gives up on those that are
// too slow. Same step times as simulator/kernel.hpp, which also knows memory.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "ready.hpp"
#include "tails.hpp"

namespace devplace {

class Incremental {
 public:
  static constexpr i64 never = std::numeric_limits<i64>::max();

  explicit Incremental(const Core& core) : core_(core), tails_(core), ready_(core.num_devices) {
    const std::size_t N = core.num_tasks;
    marked_.assign(N, 0);
    before_.assign(N, -1);
    place_.assign(N, 0);
    ready_at_.assign(N, 0);
    finish_.assign(N, 0);
    arrival_.assign(core.cons.size(), 0);
    nodes_.resize(N);
    for (auto& set : ready_) set.resize(core.num_tasks);
    startable_.resize((core.num_devices + 63) / 64);
    stamp_.assign(core.num_devices, -1);
    for (std::size_t v = 0; v < N; ++v) {
      inputs_.push_back(core.in_ptr[v + 1] - core.in_ptr[v]);
      nodes_[v].first = core.cons_ptr[core.out_ptr[v]];
      nodes_[v].last = core.cons_ptr[core.out_ptr[v + 1]];
      if (core.is_source[v]) sources_.push_back(static_cast<i32>(v));
      else if (!inputs_.back()) roots_.push_back(static_cast<i32>(v));
    }
  }

  const std::vector<i32>& device() const { return device_; }
  const std::vector<i64>& priority() const { return priority_; }
  i64 makespan() const { return makespan_; }
  i64 num_events() const { return num_events_; }

  // Takes a placement as the one that changes start from, with its critical-path priorities.
  void reset(const std::vector<i32>& device) {
    device_ = device;
    moves_.clear();
    load_.assign(core_.num_devices, 0);
    for (i32 v = 0; v < core_.num_tasks; ++v) {
      nodes_[v].device = device_[v];
      nodes_[v].work = core_.is_source[v] ? 0 : core_.duration(v, device_[v]);
      load_[device_[v]] += nodes_[v].work;
    }
    tails_.set(device_);
    for (i32 v = 0; v < core_.num_tasks; ++v) nodes_[v].tail = tails_.length()[v];
    use(tails_.length());
  }

  // Takes other priorities.
  void use(const std::vector<i64>& priority) {
    priority_ = priority;
    set_ranks();
    record(-1);
  }

  // Step time if these tasks moved, `never` if it would be above `cutoff`. The change is kept in
  // mind until `accept` or `reject`.
  // With `fresh`, tasks get the critical-path priorities of the new placement; then the step is
  // simulated from its start.
  i64 try_move(const std::vector<std::pair<i32, i32>>& moves, i64 cutoff, bool fresh = false) {
    moves_.clear();
    moved_to_.clear();
    for (const auto& [task, target] : moves) {
      if (device_[task] == target) continue;
      moves_.push_back({task, device_[task]});
      moved_to_.push_back(target);
    }
    is_fresh_ = fresh;
    from_ = fresh ? 0 : affected_from();
    for (std::size_t k = 0; k < moves_.size(); ++k) place(moves_[k].first, moved_to_[k]);
    tails_.update(moves_, device_, [&](i32 v, i64 length) { nodes_[v].tail = length; });
    if (fresh) {
      held_priority_.swap(priority_);
      held_ranks_.swap(ranks_);
      priority_ = tails_.length();
      set_ranks();
    }
    found_ = resume(cutoff);
    return found_;
  }

  void reject() {
    for (const auto& [task, old] : moves_) place(task, old);
    tails_.undo([&](i32 v, i64 length) { nodes_[v].tail = length; });
    moves_.clear();
    if (!is_fresh_) return;
    priority_.swap(held_priority_);
    ranks_.swap(held_ranks_);
    copy_ranks();
    is_fresh_ = false;
  }

  // Keeps the change, which must have been simulated to its end.
  void accept() {
    is_fresh_ = false;
    const int k = snapshot_before(from_);
    std::vector<i64> change(core_.num_devices, 0);
    for (const auto& [task, old] : moves_) {
      change[old] -= core_.is_source[task] ? 0 : core_.duration(task, old);
      change[device_[task]] += nodes_[task].work;
    }
    for (int j = 0; j <= k; ++j)
      for (i32 d = 0; d < core_.num_devices; ++d) snapshots_[j].left[d] += change[d];
    moves_.clear();
    record(k);
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
        const i64 there = device_[u] == d ? finish_[u] : arrival_[first_reader(core_.in_carrier[j], d)];
        if (there > when) {
          best = u;
          when = there;
        }
      }
      task = best;
    }
  }

 private:
  // The task of a device that ended last, of those the one started last.
  struct Ended {
    i64 finish = -1;
    i32 place = -1, task = -1;
  };
  struct Ending {
    i64 finish;
    i32 rank, task;
  };
  struct EndingFirst {
    bool operator()(const Ending& a, const Ending& b) const {
      return a.finish < b.finish || (a.finish == b.finish && a.rank < b.rank);
    }
  };
  // What the clock needs of a task, in one piece of a cache line.
  struct Node {
    i64 work, tail;   // on its device; longest path to the end, with it
    i32 first, last;  // its readers, in `cons`
    i32 device, rank;
  };
  struct State {
    i64 now = 0, makespan = 0;
    i32 started = 0;
    std::vector<i64> lane_free, channel_free, debt, left;
    std::vector<i32> missing, idle;
    std::vector<Ended> ended;
    Heap<Ending, EndingFirst> running;
    Heap<Arrival, ArrivalFirst> arrivals;
    std::vector<i32> ready;  // tasks; only in snapshots
  };
  static constexpr int most_snapshots = 24;

  void place(i32 task, i32 device) {
    Node& node = nodes_[task];
    load_[node.device] -= node.work;
    device_[task] = node.device = device;
    node.work = core_.is_source[task] ? 0 : core_.duration(task, device);
    load_[device] += node.work;
  }

  // Where a carrier's arrival on a device is kept: at its first reader there.
  i32 first_reader(i32 carrier, i32 device) const {
    i32 j = core_.cons_ptr[carrier];
    while (device_[core_.cons[j]] != device) ++j;
    return j;
  }

  void set_ranks() {
    ranks_.set(priority_);
    copy_ranks();
  }
  void copy_ranks() {
    for (i32 v = 0; v < core_.num_tasks; ++v) nodes_[v].rank = ranks_.of(v);
  }

  int snapshot_before(i64 instant) const {
    int k = num_snapshots_ - 1;
    while (k >= 0 && snapshots_[k].now >= instant) --k;
    return k;
  }

  // Simulates from a snapshot, or from the start (-1), and takes snapshots on the way.
  void record(int k) {
    const i32 every = std::max(1, core_.num_tasks / most_snapshots);
    begin<true>(k);
    num_snapshots_ = k + 1;
    i32 next = k < 0 ? 0 : state_.started + every;
    do {
      if (state_.started < next) continue;
      if (static_cast<std::size_t>(num_snapshots_) == snapshots_.size()) snapshots_.emplace_back();
      State& kept = snapshots_[num_snapshots_++];
      kept = state_;
      kept.ready.clear();
      for (const RankSet& set : ready_) set.each([&](i32 rank) { kept.ready.push_back(ranks_.task(rank)); });
      next = state_.started + every;
    } while (instant<true>(never));
    makespan_ = state_.makespan;
  }

  i64 resume(i64 cutoff) {
    const int k = snapshot_before(from_);
    begin<false>(k);
    if (k >= 0)
      for (const auto& [task, old] : moves_) {
        state_.left[old] -= core_.duration(task, old);
        state_.left[device_[task]] += nodes_[task].work;
      }
    while (instant<false>(cutoff)) {
    }
    // Ops that began before the snapshot were not compared with this cutoff.
    return state_.makespan <= cutoff ? state_.makespan : never;
  }

  template <bool keep>
  void begin(int k) {
    for (RankSet& set : ready_) set.clear();
    std::fill(startable_.begin(), startable_.end(), 0);
    std::fill(stamp_.begin(), stamp_.end(), -1);
    if (k < 0) {
      prepare<keep>();
      return;
    }
    state_ = snapshots_[k];
    for (const i32 v : state_.ready) make_ready<false>(v);
    state_.ready.clear();
  }

  // Events of one instant; false at the end, or (makespan = never) above the cutoff.
  template <bool keep>
  bool instant(i64 cutoff) {
    State& s = state_;
    for (std::size_t w = 0; w < startable_.size(); ++w) {
      for (u64 devices = startable_[w]; devices; devices &= devices - 1) {
        const i32 d = static_cast<i32>(w * 64) + lowest_bit(devices);
        while (s.idle[d] && !ready_[d].empty())
          if (!start<keep>(d, cutoff)) return false;
      }
      startable_[w] = 0;
    }
    i64 next = s.arrivals.empty() ? never : s.arrivals.top().time;
    if (!s.running.empty()) next = std::min(next, s.running.top().finish);
    if (next == never) return false;
    s.now = next;
    while (!s.running.empty() && s.running.top().finish == s.now) {
      const i32 task = s.running.top().task, d = nodes_[task].device;
      s.running.pop();
      ++s.idle[d];
      startable_[d >> 6] |= u64{1} << (d & 63);
      if constexpr (keep) has_ended(task, d);
      finish<keep>(task);
    }
    while (!s.arrivals.empty() && s.arrivals.top().time == s.now) {
      const Arrival a = s.arrivals.top();
      s.arrivals.pop();
      arrive<keep>(a);
    }
    return true;
  }

  template <bool keep>
  bool start(i32 d, i64 cutoff) {
    State& s = state_;
    const i32 rank = ready_[d].pop(), v = ranks_.task(rank);
    const Node& node = nodes_[v];
    const i64 own = node.work, end = s.now + own + s.debt[d];
    s.debt[d] = 0;
    s.left[d] -= own;
    s.makespan = std::max(s.makespan, end);
    ++s.started;
    ++num_events_;
    if constexpr (keep) {
      finish_[v] = end;
      before_[v] = s.ended[d].task;
      place_[v] = s.started;
      if (end == s.now) has_ended(v, d);
    } else if (s.now + node.tail > cutoff || (end + s.left[d] > cutoff && core_.streams[d] == 1)) {
      s.makespan = never;
      return false;
    }
    --s.idle[d];
    s.running.push({end, rank, v});
    return true;
  }

  void has_ended(i32 task, i32 d) {
    Ended& last = state_.ended[d];
    if (last.finish < state_.now || last.place < place_[task]) last = {state_.now, place_[task], task};
  }

  template <bool keep>
  void prepare() {
    State& s = state_;
    const i32 D = core_.num_devices;
    s.now = s.makespan = 0;
    s.started = 0;
    s.missing = inputs_;
    s.left = load_;
    s.channel_free.assign(core_.num_channels, 0);
    s.lane_free.assign(2 * static_cast<std::size_t>(D) * D, 0);
    s.debt.assign(D, 0);
    s.idle = core_.streams;
    s.ended.assign(D, {});
    s.running.clear();
    s.arrivals.clear();
    std::sort(sources_.begin(), sources_.end(), [&](i32 a, i32 b) { return ranks_.of(a) < ranks_.of(b); });
    for (const i32 v : sources_) finish<keep>(v);
    for (const i32 v : roots_) make_ready<keep>(v);
  }

  template <bool keep>
  void make_ready(i32 v) {
    const i32 d = nodes_[v].device;
    if constexpr (keep) ready_at_[v] = state_.now;
    startable_[d >> 6] |= u64{1} << (d & 63);
    ready_[d].insert(nodes_[v].rank);
  }

  template <bool keep>
  void finish(i32 v) {
    const i32 d = nodes_[v].device, last = nodes_[v].last;
    for (i32 j = nodes_[v].first; j < last; ++j) {
      const i32 reader = core_.cons[j], e = nodes_[reader].device;
      if (e == d) {
        if (--state_.missing[reader] == 0) make_ready<keep>(reader);
        continue;
      }
      const i32 x = core_.cons_carrier[j];
      if (stamp_[e] == x) continue;
      stamp_[e] = x;
      const i64 when = send(x, d, e);
      if constexpr (keep) arrival_[j] = when;
    }
  }

  i64 send(i32 x, i32 d, i32 e) {
    State& s = state_;
    const i32 pair = d * core_.num_devices + e;
    const i32 first = core_.channel_ptr[pair], last = core_.channel_ptr[pair + 1];
    const Price& price = core_.price(pair, x);
    i64 end = s.now + price.transfer_ns;
    if (price.queues != 2) {  // 2: waits for nothing
      i64& lane = s.lane_free[2 * static_cast<std::size_t>(pair) + price.queues];
      i64 begin = std::max(s.now, lane);
      if (price.queues)
        for (i32 c = first; c < last; ++c) begin = std::max(begin, s.channel_free[core_.channel[c]]);
      lane = end = begin + price.transfer_ns;
      for (i32 c = first; c < last; ++c) {
        i64& free = s.channel_free[core_.channel[c]];
        free = std::max(free, begin) + price.channel_ns;
      }
    }
    s.debt[d] += price.send_ns;
    const i64 when = end + core_.latency_ns[pair];
    s.arrivals.push({when, x, e});
    return when;
  }

  template <bool keep>
  void arrive(const Arrival& a) {
    const i32 d = device_[core_.carrier_task[a.carrier]];
    state_.debt[a.device] += core_.price(d * core_.num_devices + a.device, a.carrier).receive_ns;
    for (i32 j = core_.cons_ptr[a.carrier]; j < core_.cons_ptr[a.carrier + 1]; ++j)
      if (nodes_[core_.cons[j]].device == a.device && --state_.missing[core_.cons[j]] == 0)
        make_ready<keep>(core_.cons[j]);
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
      from = std::min(from, ready_at_[v]);
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) {
        const i32 u = core_.in_task[j];
        if (device_[u] != old || after(u) != after(v)) from = std::min(from, finish_[u]);
      }
    }
    for (const auto& [v, old] : moves_) marked_[v] = 0;
    return from;
  }

  const Core& core_;
  Tails tails_;
  Ranks ranks_, held_ranks_;
  State state_;
  std::vector<State> snapshots_;
  int num_snapshots_ = 0;
  bool is_fresh_ = false;
  i64 makespan_ = 0, found_ = 0, from_ = 0, num_events_ = 0;
  std::vector<RankSet> ready_;
  std::vector<u64> startable_;  // devices that may have something to start
  std::vector<i32> device_, before_, place_, marked_, moved_to_, inputs_, sources_, roots_, stamp_;
  std::vector<i64> priority_, held_priority_, ready_at_, finish_, arrival_, load_;
  std::vector<Node> nodes_;
  std::vector<std::pair<i32, i32>> moves_;
};

}  // namespace devplace

// The clock of `Incremental`: one simulated step, which may start from a snapshot of another.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "ready.hpp"

namespace devplace {

class Clock {
 public:
  static constexpr i64 never = std::numeric_limits<i64>::max();

  // What the clock needs of a task, in one piece of a cache line.
  struct Node {
    i64 work, tail;   // on its device; longest path to the end, with it
    i32 first, last;  // its readers, in `cons`
    i32 device, rank;
  };
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
  struct State {
    i64 now = 0, makespan = 0;
    i32 started = 0;
    std::vector<i64> channel_free, debt, left;
    std::vector<i32> idle;
    std::vector<Ended> ended;
    Heap<Ending, EndingFirst> running;
    Heap<Arrival, ArrivalFirst> arrivals;
  };
  // A state on the way, with ready tasks, and inputs that tasks miss in a byte each.
  struct Snapshot {
    State state;
    std::vector<i32> ready;
    std::vector<std::pair<i32, i64>> busy_lanes;
    std::vector<u8> missing;
    std::vector<std::pair<i32, i32>> missing_more;  // tasks that miss 255 and more
  };

  // When what happened, of the step recorded last.
  struct Record {
    std::vector<i64> ready_at, finish;
    std::vector<i64> arrival;         // of a carrier on a device: at its first reader there, in `cons`
    std::vector<i32> before, place;   // what a task's device did before; order of starts
  };

  explicit Clock(const Core& core) : core_(core), ready_(core.num_devices) {
    const std::size_t N = core.num_tasks;
    record.before.assign(N, -1);
    if (!core.one_stream) record.place.assign(N, 0);
    record.ready_at.assign(N, 0);
    record.finish.assign(N, 0);
    record.arrival.assign(core.cons.size(), 0);
    nodes.resize(N);
    missing_.assign(N, 0);
    for (auto& set : ready_) set.resize(core.num_tasks);
    startable_.resize((core.num_devices + 63) / 64);
    stamp_.assign(core.num_devices, -1);
    lane_free_.assign(2 * static_cast<std::size_t>(core.num_devices) * core.num_devices, 0);
    load.assign(core.num_devices, 0);
    for (std::size_t v = 0; v < N; ++v) {
      nodes[v].first = core.cons_ptr[core.out_ptr[v]];
      nodes[v].last = core.cons_ptr[core.out_ptr[v + 1]];
      if (core.is_source[v]) sources_.push_back(static_cast<i32>(v));
      else if (core.in_ptr[v] == core.in_ptr[v + 1]) roots_.push_back(static_cast<i32>(v));
    }
  }

  std::vector<Node> nodes;
  std::vector<i64> load;  // of each device
  Ranks ranks;
  bool in_turn = false;  // devices with one stream run their tasks by rank, and wait; no snapshots then
  Record record;
  State state;
  i64 num_events = 0;

  // Begins from a snapshot, or from the start (nullptr).
  template <bool keep>
  void begin(const Snapshot* from) {
    for (RankSet& set : ready_) set.clear();
    std::fill(startable_.begin(), startable_.end(), 0);
    std::fill(stamp_.begin(), stamp_.end(), -1);
    std::fill(lane_free_.begin(), lane_free_.end(), 0);
    if (from == nullptr) prepare<keep>();
    else restore(*from);
  }

  void keep_state(Snapshot& kept) const {
    kept.state = state;
    kept.ready.clear();
    for (const RankSet& set : ready_) set.each([&](i32 rank) { kept.ready.push_back(ranks.task(rank)); });
    kept.busy_lanes.clear();
    for (std::size_t k = 0; k < lane_free_.size(); ++k)
      if (lane_free_[k] > state.now) kept.busy_lanes.push_back({static_cast<i32>(k), lane_free_[k]});
    kept.missing.resize(core_.num_tasks);
    kept.missing_more.clear();
    for (i32 v = 0; v < core_.num_tasks; ++v) {
      kept.missing[v] = static_cast<u8>(std::min(missing_[v], 255));
      if (missing_[v] >= 255) kept.missing_more.push_back({v, missing_[v]});
    }
  }

  // Events of one instant; false at the end, or (makespan = never) above the cutoff.
  template <bool keep>
  bool instant(i64 cutoff) {
    State& s = state;
    for (std::size_t w = 0; w < startable_.size(); ++w) {
      for (u64 devices = startable_[w]; devices; devices &= devices - 1) {
        const i32 d = static_cast<i32>(w * 64) + lowest_bit(devices);
        if (in_turn && core_.streams[d] == 1) {
          while (s.idle[d] && !ready_[d].empty() && is_due(d)) {
            ++num_begun_[d];
            if (!start<keep>(d, cutoff)) return false;
          }
          continue;
        }
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
      const i32 task = s.running.top().task, d = nodes[task].device;
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

 private:
  bool is_due(i32 d) const { return ready_[d].first() == due_[d][num_begun_[d]]; }
  // What each device runs, by rank.
  void set_due() {
    due_.resize(core_.num_devices);
    for (auto& row : due_) row.clear();
    num_begun_.assign(core_.num_devices, 0);
    for (i32 rank = 0; rank < core_.num_tasks; ++rank) {
      const i32 v = ranks.task(rank);
      if (!core_.is_source[v]) due_[nodes[v].device].push_back(rank);
    }
  }

  void restore(const Snapshot& kept) {
    state = kept.state;
    for (const auto& [lane, free] : kept.busy_lanes) lane_free_[lane] = free;
    for (i32 v = 0; v < core_.num_tasks; ++v) missing_[v] = kept.missing[v];
    for (const auto& [v, count] : kept.missing_more) missing_[v] = count;
    for (const i32 v : kept.ready) make_ready<false>(v);
  }

  template <bool keep>
  bool start(i32 d, i64 cutoff) {
    State& s = state;
    const i32 rank = ready_[d].pop(), v = ranks.task(rank);
    const Node& node = nodes[v];
    const i64 own = node.work, end = s.now + own + s.debt[d];
    s.debt[d] = 0;
    s.left[d] -= own;
    s.makespan = std::max(s.makespan, end);
    ++s.started;
    ++num_events;
    if constexpr (keep) {
      record.finish[v] = end;
      record.before[v] = s.ended[d].task;
      if (!core_.one_stream) record.place[v] = s.started;
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
    Ended& last = state.ended[d];
    const i32 place = core_.one_stream ? state.started : record.place[task];
    if (last.finish < state.now || last.place < place) last = {state.now, place, task};
  }

  template <bool keep>
  void prepare() {
    State& s = state;
    const i32 D = core_.num_devices;
    s.now = s.makespan = 0;
    s.started = 0;
    if (in_turn) set_due();
    for (i32 v = 0; v < core_.num_tasks; ++v) missing_[v] = core_.in_ptr[v + 1] - core_.in_ptr[v];
    s.left = load;
    s.channel_free.assign(core_.num_channels, 0);
    s.debt.assign(D, 0);
    s.idle = core_.streams;
    s.ended.assign(D, {});
    s.running.clear();
    s.arrivals.clear();
    std::sort(sources_.begin(), sources_.end(), [&](i32 a, i32 b) { return ranks.of(a) < ranks.of(b); });
    for (const i32 v : sources_) finish<keep>(v);
    for (const i32 v : roots_) make_ready<keep>(v);
  }

  template <bool keep>
  void make_ready(i32 v) {
    const i32 d = nodes[v].device;
    if constexpr (keep) record.ready_at[v] = state.now;
    startable_[d >> 6] |= u64{1} << (d & 63);
    ready_[d].insert(nodes[v].rank);
  }

  template <bool keep>
  void finish(i32 v) {
    const i32 d = nodes[v].device, last = nodes[v].last;
    for (i32 j = nodes[v].first; j < last; ++j) {
      const i32 reader = core_.cons[j], e = nodes[reader].device;
      if (e == d) {
        if (--missing_[reader] == 0) make_ready<keep>(reader);
        continue;
      }
      const i32 x = core_.cons_carrier[j];
      if (stamp_[e] == x) continue;
      stamp_[e] = x;
      const i64 when = send(x, d, e);
      if constexpr (keep) record.arrival[j] = when;
    }
  }

  i64 send(i32 x, i32 d, i32 e) {
    State& s = state;
    const i32 pair = d * core_.num_devices + e;
    const Price& price = core_.price(pair, x);
    const i64 begin = core_.occupy(price, pair, s.now, lane_free_.data(), s.channel_free.data());
    s.debt[d] += price.send_ns;
    const i64 when = begin + price.transfer_ns + core_.latency_ns[pair];
    s.arrivals.push({when, x, e});
    return when;
  }

  template <bool keep>
  void arrive(const Arrival& a) {
    const i32 d = nodes[core_.carrier_task[a.carrier]].device;
    state.debt[a.device] += core_.price(d * core_.num_devices + a.device, a.carrier).receive_ns;
    for (i32 j = core_.cons_ptr[a.carrier]; j < core_.cons_ptr[a.carrier + 1]; ++j)
      if (nodes[core_.cons[j]].device == a.device && --missing_[core_.cons[j]] == 0)
        make_ready<keep>(core_.cons[j]);
  }

  const Core& core_;
  std::vector<RankSet> ready_;
  std::vector<u64> startable_;  // devices that may have something to start
  std::vector<std::vector<i32>> due_;
  std::vector<i32> missing_, sources_, roots_, stamp_, num_begun_;
  std::vector<i64> lane_free_;
};

}  // namespace devplace

// The simulator of src/devplace/simulator/reference.py, written for speed; see there for the rules.
// Every quantity is an integer, so both give the same nanosecond and byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

namespace devplace {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;

// What sending one carrier over one kind of link takes; names as in problem/transfers.py.
struct Price {
  i64 transfer_ns, channel_ns, send_ns, receive_ns;
  u8 queues;
};
// What a transfer waits for.
enum : u8 { LANE, CHANNELS, NOTHING };

// Read-only arrays; names and shapes as in problem/core.py and problem/transfers.py.
struct Core {
  i32 num_tasks = 0, num_devices = 0, num_channels = 0, num_pools = 0, num_consts = 0;
  std::vector<u8> is_source, storage_held, fixed_buffers;
  std::vector<i64> workspace_bytes, carrier_bytes, storage_bytes, const_bytes;
  std::vector<i32> out_ptr, carrier_storage, cons_ptr, cons, in_ptr, in_carrier, storage_ptr;
  std::vector<i32> storage_over;
  std::vector<i32> const_ptr, const_user, carrier_task;
  std::vector<i32> in_task, in_storage;  // of in_carrier, so that a release reads in sequence
  std::vector<i32> cons_carrier;         // of cons, likewise
  std::vector<i64> duration_ns, latency_ns, held_bytes;
  std::vector<i64> copy_ns;                // [K, D]
  std::vector<i32> copied;                 // read-only sources whose copies take time
  std::vector<i32> read_ptr, read_copied;  // of each task, those that it reads, as places in `copied`
  std::vector<Price> prices;  // [C, T]
  bool one_stream = true;
  std::vector<i32> link_class, channel_ptr, channel, streams, pool;

  const Price& price(i32 pair, i32 carrier) const {
    return prices[static_cast<std::size_t>(link_class[pair]) * carrier_bytes.size() + carrier];
  }
  // When a transfer requested at `now` begins. It occupies its lane (two for each pair) and channels,
  // of which is kept when they are free.
  i64 occupy(const Price& price, i32 pair, i64 now, i64* lane_free, i64* channel_free) const {
    if (price.queues == NOTHING) return now;
    const i32 first = channel_ptr[pair], last = channel_ptr[pair + 1];
    i64& lane = lane_free[2 * static_cast<std::size_t>(pair) + price.queues];
    i64 begin = std::max(now, lane);
    if (price.queues == CHANNELS)
      for (i32 c = first; c < last; ++c) begin = std::max(begin, channel_free[channel[c]]);
    lane = begin + price.transfer_ns;
    for (i32 c = first; c < last; ++c) {
      i64& free = channel_free[channel[c]];
      free = std::max(free, begin) + price.channel_ns;
    }
    return begin;
  }
  i64 duration(i32 task, i32 device) const {
    return duration_ns[static_cast<std::size_t>(task) * num_devices + device];
  }

  // Time it takes to copy the batch to the devices that read it, one copy after the other.
  i64 batch_ns(const i32* device) const {
    if (copied.empty()) return 0;
    i64 total = 0;
    std::vector<u8> there(num_devices);
    for (const i32 k : copied) {
      std::fill(there.begin(), there.end(), 0);
      for (i32 j = const_ptr[k]; j < const_ptr[k + 1]; ++j) there[device[const_user[j]]] = 1;
      for (i32 d = 0; d < num_devices; ++d)
        if (there[d]) total += copy_ns[static_cast<std::size_t>(k) * num_devices + d];
    }
    return total;
  }

  // Sizes, and the arrays that follow from others.
  void derive() {
    num_tasks = static_cast<i32>(is_source.size());
    num_devices = static_cast<i32>(streams.size());
    num_consts = static_cast<i32>(const_bytes.size());
    for (const i32 s : streams) one_stream &= s == 1;
    carrier_task.resize(carrier_bytes.size());
    for (i32 v = 0; v < num_tasks; ++v)
      for (i32 x = out_ptr[v]; x < out_ptr[v + 1]; ++x) carrier_task[x] = v;
    for (const i32 x : in_carrier) {
      in_task.push_back(carrier_task[x]);
      in_storage.push_back(carrier_storage[x]);
    }
    cons_carrier.resize(cons.size());
    for (std::size_t x = 0; x < carrier_bytes.size(); ++x)
      for (i32 j = cons_ptr[x]; j < cons_ptr[x + 1]; ++j) cons_carrier[j] = static_cast<i32>(x);
    derive_copied();
  }

  void derive_copied() {
    std::vector<std::vector<i32>> reads(num_tasks);
    for (i32 k = 0; k < num_consts; ++k) {
      const auto row = copy_ns.begin() + static_cast<std::ptrdiff_t>(k) * num_devices;
      if (std::all_of(row, row + num_devices, [](i64 ns) { return ns == 0; })) continue;
      for (i32 j = const_ptr[k]; j < const_ptr[k + 1]; ++j)
        reads[const_user[j]].push_back(static_cast<i32>(copied.size()));
      copied.push_back(k);
    }
    read_ptr.push_back(0);
    for (const auto& row : reads) {
      read_copied.insert(read_copied.end(), row.begin(), row.end());
      read_ptr.push_back(static_cast<i32>(read_copied.size()));
    }
  }
};

// 4-ary heap; Less must be a strict total order on what matters.
template <class T, class Less>
class Heap {
 public:
  void clear() { items_.clear(); }
  bool empty() const { return items_.empty(); }
  const T& top() const { return items_[0]; }

  void push(const T& x) {
    std::size_t i = items_.size();
    items_.push_back(x);
    while (i) {
      const std::size_t parent = (i - 1) >> 2;
      if (!less_(x, items_[parent])) break;
      items_[i] = items_[parent];
      i = parent;
    }
    items_[i] = x;
  }

  void pop() {
    const T x = items_.back();
    items_.pop_back();
    const std::size_t n = items_.size();
    if (!n) return;
    std::size_t i = 0;
    for (;;) {
      const std::size_t first = 4 * i + 1;
      if (first >= n) break;
      const std::size_t last = std::min(first + 4, n);
      std::size_t best = first;
      for (std::size_t c = first + 1; c < last; ++c)
        if (less_(items_[c], items_[best])) best = c;
      if (!less_(items_[best], x)) break;
      items_[i] = items_[best];
      i = best;
    }
    items_[i] = x;
  }

 private:
  std::vector<T> items_;
  Less less_;
};

struct ReadyTask {
  i64 priority;
  i32 task;
};
struct ReadyFirst {
  bool operator()(const ReadyTask& a, const ReadyTask& b) const {
    return a.priority > b.priority || (a.priority == b.priority && a.task < b.task);
  }
};
struct Arrival {
  i64 time;
  i32 carrier, device;
};
struct ArrivalFirst {
  bool operator()(const Arrival& a, const Arrival& b) const { return a.time < b.time; }
};
struct Running {
  i64 finish;
  i32 task, device;
};
struct RunningFirst {
  bool operator()(const Running& a, const Running& b) const { return a.finish < b.finish; }
};

struct Transfer {
  i64 carrier, source, destination, request, start, arrival;
};
struct MemoryStep {
  i64 time, device, bytes;
};

struct Outcome {
  i64 makespan = 0, transfer_bytes = 0;
  std::vector<i64> peak, pool_peak, busy;
  // Only with a trace:
  std::vector<i64> start, finish, sequence;
  std::vector<Transfer> transfers;
  std::vector<MemoryStep> memory;
};

// Longest path from a task's start to the end, given those of the tasks after it.
template <class Length>
i64 path_length(const Core& core, const i32* device, const Length& length, i32 v) {
  const i32 D = core.num_devices, d = device[v];
  const i32 last = core.cons_ptr[core.out_ptr[v + 1]];
  i64 tail = 0;
  for (i32 j = core.cons_ptr[core.out_ptr[v]]; j < last; ++j) {
    const i32 c = core.cons[j], e = device[c];
    i64 way = length(c);
    if (e != d) way += core.price(d * D + e, core.cons_carrier[j]).transfer_ns + core.latency_ns[d * D + e];
    tail = std::max(tail, way);
  }
  return core.duration(v, d) + tail;
}

inline void critical_path(const Core& core, const i32* device, i64* length) {
  const auto known = [&](i32 v) { return length[v]; };
  for (i32 v = core.num_tasks - 1; v >= 0; --v) length[v] = path_length(core, device, known, v);
}

// One simulator with its scratch memory; use one per thread.
class Simulator {
 public:
  explicit Simulator(const Core& core) : core_(core), ready_(core.num_devices) {}

  // With `track_memory` false the peaks are left at zero. With `turn`, a device with one stream runs
  // its tasks by falling turn, then rising index, and waits for the next one where it must.
  template <bool track_memory, bool trace>
  void run(const i32* device, const i64* priority, const i64* turn, Outcome& out) {
    prepare<track_memory, trace>(device, priority, turn, out);
    for (;;) {
      for (i32 d = 0; d < core_.num_devices; ++d) start_ready<track_memory, trace>(d, out);
      if constexpr (track_memory) look_at_memory<trace>(out);
      if (!next_instant()) break;
      collect_finished();
      for (const ReadyTask& item : finished_) {
        --running_count_[device_[item.task]];
        finish<track_memory, trace>(item.task, out);
      }
      while (!arrivals_.empty() && arrivals_.top().time == now_) {
        const Arrival a = arrivals_.top();
        arrivals_.pop();
        arrive<track_memory>(a);
      }
    }
    if constexpr (track_memory) add_kept<trace>(out);
  }

 private:
  static constexpr i64 never = std::numeric_limits<i64>::max();

  template <bool track_memory, bool trace>
  void prepare(const i32* device, const i64* priority, const i64* turn, Outcome& out) {
    const i32 N = core_.num_tasks, D = core_.num_devices;
    device_ = device;
    priority_ = priority;
    turn_ = turn;
    if (turn) set_due();
    now_ = core_.batch_ns(device);
    started_ = 0;
    missing_.resize(N);
    for (i32 v = 0; v < N; ++v) missing_[v] = core_.in_ptr[v + 1] - core_.in_ptr[v];
    channel_free_.assign(core_.num_channels, 0);
    lane_free_.assign(2 * static_cast<std::size_t>(core_.num_devices) * core_.num_devices, 0);
    running_count_.assign(D, 0);
    slot_finish_.assign(D, never);
    slot_task_.assign(D, -1);
    debt_.assign(D, 0);
    memory_.assign(D, 0);
    shown_.assign(D, -1);
    stamp_.assign(D, -1);
    readers_there_.assign(D, 0);
    for (auto& heap : ready_) heap.clear();
    arrivals_.clear();
    running_.clear();
    out.makespan = out.transfer_bytes = 0;
    out.peak.assign(D, 0);
    out.busy.assign(D, 0);
    out.pool_peak.assign(core_.num_pools, 0);
    if constexpr (track_memory) {
      references_.resize(core_.storage_bytes.size());
      in_place_.resize(core_.storage_bytes.size());
      copies_.resize(core_.carrier_bytes.size() * static_cast<std::size_t>(D));
      place_consts();
      hold_bytes();
    }
    if constexpr (trace) {
      out.start.assign(N, 0);
      out.finish.assign(N, 0);
      out.sequence.assign(N, 0);
      out.transfers.clear();
      out.memory.clear();
    }
    start_sources<track_memory, trace>(out);
    for (i32 v = 0; v < N; ++v)
      if (!core_.is_source[v] && core_.in_ptr[v + 1] == core_.in_ptr[v]) make_ready(v);
  }

  void place_consts() {
    for (i32 k = 0; k < core_.num_consts; ++k) {
      std::fill(stamp_.begin(), stamp_.end(), -1);
      for (i32 j = core_.const_ptr[k]; j < core_.const_ptr[k + 1]; ++j) {
        const i32 d = device_[core_.const_user[j]];
        if (stamp_[d] == k) continue;
        stamp_[d] = k;
        memory_[d] += core_.const_bytes[k];
      }
    }
    std::fill(stamp_.begin(), stamp_.end(), -1);
  }

  // What is held from the first instant to the last is added to the peaks at the end.
  void hold_bytes() {
    kept_.assign(core_.num_devices, 0);
    for (i32 v = 0; v < core_.num_tasks; ++v) kept_[device_[v]] = core_.held_bytes[device_[v]];
  }

  template <bool trace>
  void add_kept(Outcome& out) {
    for (i32 d = 0; d < core_.num_devices; ++d) {
      out.peak[d] += kept_[d];
      if (core_.num_pools && core_.pool[d] >= 0) out.pool_peak[core_.pool[d]] += kept_[d];
    }
    if constexpr (trace)
      for (MemoryStep& step : out.memory) step.bytes += kept_[step.device];
  }

  template <bool track_memory, bool trace>
  void start_sources(Outcome& out) {
    finished_.clear();
    for (i32 v = 0; v < core_.num_tasks; ++v)
      if (core_.is_source[v]) finished_.push_back({priority_[v], v});
    std::sort(finished_.begin(), finished_.end(), ReadyFirst{});
    const std::vector<ReadyTask> sources = finished_;
    for (const ReadyTask& item : sources) {
      if constexpr (trace) out.start[item.task] = out.finish[item.task] = now_;
      if constexpr (track_memory) allocate(item.task);
      finish<track_memory, trace>(item.task, out);
    }
  }

  // What each device runs, in turn.
  void set_due() {
    const std::size_t N = core_.num_tasks;
    if (known_turn_.size() != N || !std::equal(known_turn_.begin(), known_turn_.end(), turn_)) {
      known_turn_.assign(turn_, turn_ + N);
      in_turn_.clear();
      for (std::size_t v = 0; v < N; ++v)
        if (!core_.is_source[v]) in_turn_.push_back({turn_[v], static_cast<i32>(v)});
      std::sort(in_turn_.begin(), in_turn_.end(), ReadyFirst{});
    }
    due_.resize(core_.num_devices);
    for (auto& row : due_) row.clear();
    num_begun_.assign(core_.num_devices, 0);
    for (const ReadyTask& item : in_turn_) due_[device_[item.task]].push_back(item.task);
  }
  bool has_turns(i32 d) const { return turn_ && core_.streams[d] == 1; }

  void make_ready(i32 v) {
    const i32 d = device_[v];
    ready_[d].push({has_turns(d) ? turn_[v] : priority_[v], v});
  }

  void one_input_less(i32 v) {
    if (--missing_[v] == 0) make_ready(v);
  }

  template <bool track_memory, bool trace>
  void start_ready(i32 d, Outcome& out) {
    while (running_count_[d] < core_.streams[d] && !ready_[d].empty()) {
      const i32 v = ready_[d].top().task;
      if (has_turns(d)) {
        if (due_[d][num_begun_[d]] != v) break;
        ++num_begun_[d];
      }
      ready_[d].pop();
      const i64 end = now_ + core_.duration(v, d) + debt_[d];
      debt_[d] = 0;
      ++running_count_[d];
      out.busy[d] += end - now_;
      out.makespan = std::max(out.makespan, end);
      if constexpr (trace) {
        out.start[v] = now_;
        out.finish[v] = end;
        out.sequence[v] = started_++;
      }
      if constexpr (track_memory) allocate(v);
      if (core_.one_stream) {
        slot_finish_[d] = end;
        slot_task_[d] = v;
      } else {
        running_.push({end, v, d});
      }
    }
  }

  bool next_instant() {
    i64 next = arrivals_.empty() ? never : arrivals_.top().time;
    if (core_.one_stream) {
      for (const i64 end : slot_finish_) next = std::min(next, end);
    } else if (!running_.empty()) {
      next = std::min(next, running_.top().finish);
    }
    now_ = next;
    return next != never;
  }

  void collect_finished() {
    finished_.clear();
    if (core_.one_stream) {
      for (i32 d = 0; d < core_.num_devices; ++d) {
        if (slot_finish_[d] != now_) continue;
        finished_.push_back({priority_[slot_task_[d]], slot_task_[d]});
        slot_finish_[d] = never;
      }
    } else {
      while (!running_.empty() && running_.top().finish == now_) {
        finished_.push_back({priority_[running_.top().task], running_.top().task});
        running_.pop();
      }
    }
    if (finished_.size() > 1) std::sort(finished_.begin(), finished_.end(), ReadyFirst{});
  }

  void allocate(i32 v) {
    const i32 d = device_[v];
    i64 bytes = core_.workspace_bytes[v];
    for (i32 s = core_.storage_ptr[v]; s < core_.storage_ptr[v + 1]; ++s) {
      const i32 over = core_.storage_over[s];
      if (over >= 0) {
        in_place_[s] = core_.fixed_buffers[d] && references_[over] == 1;
        if (in_place_[s]) continue;
      }
      bytes += core_.storage_bytes[s];
    }
    memory_[d] += bytes;
  }

  template <bool track_memory, bool trace>
  void finish(i32 v, Outcome& out) {
    const i32 d = device_[v];
    if constexpr (track_memory) {
      memory_[d] -= core_.workspace_bytes[v];
      for (i32 j = core_.in_ptr[v]; j < core_.in_ptr[v + 1]; ++j) {
        if (device_[core_.in_task[j]] == d) release_storage(core_.in_storage[j], d);
        else release_copy(core_.in_carrier[j], d);
      }
      for (i32 s = core_.storage_ptr[v]; s < core_.storage_ptr[v + 1]; ++s) {
        // takes the place of the source released just now
        if (core_.storage_over[s] >= 0 && in_place_[s]) memory_[d] += core_.storage_bytes[s];
        references_[s] = core_.storage_held[s];
      }
    }
    for (i32 x = core_.out_ptr[v]; x < core_.out_ptr[v + 1]; ++x) {
      i32 uses = 0;  // readers here, and one per copy sent
      sent_to_.clear();
      for (i32 j = core_.cons_ptr[x]; j < core_.cons_ptr[x + 1]; ++j) {
        const i32 reader = core_.cons[j], e = device_[reader];
        if (e == d) {
          ++uses;
          one_input_less(reader);
          continue;
        }
        if (stamp_[e] != x) {
          stamp_[e] = x;
          readers_there_[e] = 0;
          sent_to_.push_back(e);
          send<track_memory, trace>(x, d, e, out);
        }
        ++readers_there_[e];
      }
      if constexpr (track_memory) {
        for (const i32 e : sent_to_) copies_[copy_index(x, e)] = readers_there_[e];
        references_[core_.carrier_storage[x]] += uses + static_cast<i32>(sent_to_.size());
      }
    }
    if constexpr (track_memory)
      for (i32 s = core_.storage_ptr[v]; s < core_.storage_ptr[v + 1]; ++s)
        if (!references_[s]) memory_[d] -= core_.storage_bytes[s];
  }

  std::size_t copy_index(i32 carrier, i32 device) const {
    return static_cast<std::size_t>(carrier) * core_.num_devices + device;
  }

  template <bool track_memory, bool trace>
  void send(i32 x, i32 d, i32 e, Outcome& out) {
    const i32 pair = d * core_.num_devices + e;
    const Price& price = core_.price(pair, x);
    const i64 begin = core_.occupy(price, pair, now_, lane_free_.data(), channel_free_.data());
    const i64 arrival = begin + price.transfer_ns + core_.latency_ns[pair];
    debt_[d] += price.send_ns;
    out.transfer_bytes += core_.carrier_bytes[x];
    if constexpr (track_memory) (core_.fixed_buffers[e] ? kept_ : memory_)[e] += core_.carrier_bytes[x];
    if constexpr (trace) out.transfers.push_back({x, d, e, now_, begin, arrival});
    arrivals_.push({arrival, x, e});
  }

  template <bool track_memory>
  void arrive(const Arrival& a) {
    const i32 d = device_[core_.carrier_task[a.carrier]];
    debt_[a.device] += core_.price(d * core_.num_devices + a.device, a.carrier).receive_ns;
    if constexpr (track_memory) release_storage(core_.carrier_storage[a.carrier], d);
    for (i32 j = core_.cons_ptr[a.carrier]; j < core_.cons_ptr[a.carrier + 1]; ++j)
      if (device_[core_.cons[j]] == a.device) one_input_less(core_.cons[j]);
  }

  void release_storage(i32 s, i32 d) {
    if (--references_[s] == 0) memory_[d] -= core_.storage_bytes[s];
  }

  void release_copy(i32 x, i32 d) {
    if (core_.fixed_buffers[d]) return;
    if (--copies_[copy_index(x, d)] == 0) memory_[d] -= core_.carrier_bytes[x];
  }

  template <bool trace>
  void look_at_memory(Outcome& out) {
    for (i32 d = 0; d < core_.num_devices; ++d) {
      out.peak[d] = std::max(out.peak[d], memory_[d]);
      if constexpr (trace) {
        if (memory_[d] != shown_[d]) {
          shown_[d] = memory_[d];
          out.memory.push_back({now_, d, memory_[d]});
        }
      }
    }
    if (!core_.num_pools) return;
    pool_used_.assign(core_.num_pools, 0);
    for (i32 d = 0; d < core_.num_devices; ++d)
      if (core_.pool[d] >= 0) pool_used_[core_.pool[d]] += memory_[d];
    for (i32 p = 0; p < core_.num_pools; ++p) out.pool_peak[p] = std::max(out.pool_peak[p], pool_used_[p]);
  }

  const Core& core_;
  const i32* device_ = nullptr;
  const i64 *priority_ = nullptr, *turn_ = nullptr;
  i64 now_ = 0, started_ = 0;
  std::vector<Heap<ReadyTask, ReadyFirst>> ready_;
  Heap<Arrival, ArrivalFirst> arrivals_;
  Heap<Running, RunningFirst> running_;
  std::vector<ReadyTask> finished_, in_turn_;
  std::vector<i64> known_turn_;
  std::vector<std::vector<i32>> due_;
  std::vector<i64> channel_free_, lane_free_, slot_finish_, debt_, memory_, kept_, shown_;
  std::vector<i64> pool_used_;
  std::vector<i32> slot_task_, missing_, running_count_, num_begun_, stamp_, references_, copies_;
  std::vector<i32> sent_to_, readers_there_;
  std::vector<u8> in_place_;
};

}  // namespace devplace

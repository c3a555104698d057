// Items and nets of a max-load problem, and their coarsening by matching.
//
// A net is one producer's output: it touches every device that holds the producer or a consumer.
// A touched accelerator pays the net's cost once, unless the net lies on one device only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <unordered_map>
#include <vector>

namespace devplace_load {

using i32 = std::int32_t;
using i64 = std::int64_t;
using u8 = std::uint8_t;
using u64 = std::uint64_t;

struct Random {  // splitmix64: small, and the same on every platform
  u64 state;
  explicit Random(u64 seed) : state(seed * 0x9E3779B97F4A7C15ull + 0x1234567ull) {}
  u64 next() {
    u64 z = (state += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  i32 below(i32 n) { return static_cast<i32>(((next() >> 32) * static_cast<u64>(n)) >> 32); }
  double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
};

struct Hypergraph {
  i32 num_items = 0, accelerators = 0, cpus = 0;
  i64 memory = 0;
  std::vector<i64> accelerator, cpu, size;  // per item
  std::vector<u8> can_accelerate;
  std::vector<i32> net_ptr{0}, pins;        // items of each net, distinct
  std::vector<i64> cost;                    // per net
  std::vector<i32> item_ptr, item_nets;     // nets of each item
  std::vector<i32> order;                   // items in a topological order, for runs

  i32 devices() const { return accelerators + cpus; }
  i32 num_nets() const { return static_cast<i32>(cost.size()); }

  void index_nets() {
    item_ptr.assign(num_items + 1, 0);
    for (const i32 v : pins) ++item_ptr[v + 1];
    std::partial_sum(item_ptr.begin(), item_ptr.end(), item_ptr.begin());
    item_nets.resize(pins.size());
    std::vector<i32> next(item_ptr.begin(), item_ptr.end() - 1);
    for (i32 e = 0; e < num_nets(); ++e)
      for (i32 x = net_ptr[e]; x < net_ptr[e + 1]; ++x) item_nets[next[pins[x]]++] = e;
  }
};

// Items joined as `group` says (0..count-1): sizes add up, nets inside one group vanish, and nets
// with the same pins become one.
inline Hypergraph contract(const Hypergraph& fine, const std::vector<i32>& group, i32 count) {
  Hypergraph coarse;
  coarse.num_items = count;
  coarse.accelerators = fine.accelerators;
  coarse.cpus = fine.cpus;
  coarse.memory = fine.memory;
  coarse.accelerator.assign(count, 0);
  coarse.cpu.assign(count, 0);
  coarse.size.assign(count, 0);
  coarse.can_accelerate.assign(count, 1);
  for (i32 v = 0; v < fine.num_items; ++v) {
    const i32 g = group[v];
    coarse.accelerator[g] += fine.accelerator[v];
    coarse.cpu[g] += fine.cpu[v];
    coarse.size[g] += fine.size[v];
    coarse.can_accelerate[g] &= fine.can_accelerate[v];
  }
  std::unordered_map<u64, std::vector<i32>> same;
  std::vector<i32> pins;
  for (i32 e = 0; e < fine.num_nets(); ++e) {
    pins.clear();
    for (i32 x = fine.net_ptr[e]; x < fine.net_ptr[e + 1]; ++x) pins.push_back(group[fine.pins[x]]);
    std::sort(pins.begin(), pins.end());
    pins.erase(std::unique(pins.begin(), pins.end()), pins.end());
    if (pins.size() < 2 || fine.cost[e] == 0) continue;
    u64 hash = pins.size();
    for (const i32 v : pins) hash = (hash ^ static_cast<u64>(v)) * 0x9E3779B97F4A7C15ull + 1;
    bool found = false;
    for (const i32 other : same[hash]) {
      const i32 first = coarse.net_ptr[other], last = coarse.net_ptr[other + 1];
      if (last - first == static_cast<i32>(pins.size()) &&
          std::equal(pins.begin(), pins.end(), coarse.pins.begin() + first)) {
        coarse.cost[other] += fine.cost[e];
        found = true;
        break;
      }
    }
    if (found) continue;
    same[hash].push_back(coarse.num_nets());
    coarse.cost.push_back(fine.cost[e]);
    coarse.pins.insert(coarse.pins.end(), pins.begin(), pins.end());
    coarse.net_ptr.push_back(static_cast<i32>(coarse.pins.size()));
  }
  std::vector<u8> seen(count, 0);
  for (const i32 v : fine.order)
    if (!seen[group[v]]) seen[group[v]] = 1, coarse.order.push_back(group[v]);
  coarse.index_nets();
  return coarse;
}

// Pairs of items that share dear nets, of one `label` each (if given), not above the weight limit.
// Returns the number of groups.
inline i32 match(const Hypergraph& h, const std::vector<i32>* label, i64 max_accelerator, Random& random,
                 std::vector<i32>& group) {
  const i32 n = h.num_items;
  group.assign(n, -1);
  std::vector<i32> visit(n);
  std::iota(visit.begin(), visit.end(), 0);
  for (i32 i = n - 1; i > 0; --i) std::swap(visit[i], visit[random.below(i + 1)]);
  std::vector<double> rating(n, 0.0);
  std::vector<i32> touched;
  i32 count = 0;
  for (const i32 v : visit) {
    if (group[v] >= 0) continue;
    touched.clear();
    for (i32 y = h.item_ptr[v]; y < h.item_ptr[v + 1]; ++y) {
      const i32 e = h.item_nets[y], pins = h.net_ptr[e + 1] - h.net_ptr[e];
      if (pins > 200) continue;
      const double weight = static_cast<double>(h.cost[e]) / (pins - 1) + 1e-9;
      for (i32 x = h.net_ptr[e]; x < h.net_ptr[e + 1]; ++x) {
        const i32 u = h.pins[x];
        if (u == v || group[u] >= 0) continue;
        if (rating[u] == 0.0) touched.push_back(u);
        rating[u] += weight;
      }
    }
    i32 best = -1;
    double best_rating = -1.0;
    for (const i32 u : touched) {
      const double r = rating[u] * (0.7 + 0.6 * random.unit());
      rating[u] = 0.0;
      if (label && (*label)[u] != (*label)[v]) continue;
      if (h.can_accelerate[u] != h.can_accelerate[v]) continue;
      if (h.can_accelerate[v] && (h.accelerator[u] + h.accelerator[v] > max_accelerator ||
                                  h.size[u] + h.size[v] > h.memory))
        continue;
      if (r > best_rating) best = u, best_rating = r;
    }
    group[v] = count;
    if (best >= 0) group[best] = count;
    ++count;
  }
  return count;
}

}  // namespace devplace_load

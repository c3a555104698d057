// Annealing of one placement: moves of an item, swaps, runs of the order and connected clusters.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>

#include "state.hpp"

namespace devplace_load {

struct Limits {  // what ends a search; the counts are one thread's own
  std::chrono::steady_clock::time_point deadline;
  i64 max_evaluations = 0, evaluations = 0;
  i64 bound = 0;  // a value that cannot be beaten
  const std::atomic<bool>* stop = nullptr;
  bool spent() const { return evaluations >= max_evaluations; }
  bool done() const {
    return spent() || stop->load(std::memory_order_relaxed) ||
           std::chrono::steady_clock::now() >= deadline;
  }
};

// What one of several threads may try of what all may.
inline i64 part_of(i64 all, int threads, int thread) {
  return all / threads + (thread < all % threads);
}

struct Recipe {  // one annealing run
  double hot = 0.5, cold = 0.005;  // temperatures, in units of the score
  i32 doublings = 3;               // a device scores (load / scale) ^ (2 ^ doublings)
  double memory_weight = 20.0;     // score of an accelerator that is over-full by its whole memory
  i64 steps = 0;
};

struct Mark {  // how good a placement is: first memory, then value
  i64 excess = INT64_MAX, value = INT64_MAX;
  bool operator<(const Mark& o) const {
    return excess != o.excess ? excess < o.excess : value < o.value;
  }
  bool operator==(const Mark& o) const { return excess == o.excess && value == o.value; }
};

class Annealer {
 public:
  Annealer(State& state, Random& random, Limits& limits, const Recipe& recipe, i64 scale)
      : s_(state), h_(state.hypergraph()), random_(random), limits_(limits), recipe_(recipe),
        scale_(1.0 / static_cast<double>(std::max<i64>(1, scale))),
        memory_(1.0 / static_cast<double>(std::max<i64>(1, h_.memory))) {
    rank_.assign(h_.num_items, 0);
    for (i32 i = 0; i < static_cast<i32>(h_.order.size()); ++i) rank_[h_.order[i]] = i;
    mark_ = {s_.excess(), s_.value()};
    best_ = s_.device();
  }

  // Anneals and leaves the best placement seen in `best`.
  void run() {
    if (h_.num_items == 0 || h_.devices() < 2) return;
    const double ratio = recipe_.cold / recipe_.hot;
    constexpr i64 kStride = 512;
    for (i64 step = 0; step < recipe_.steps; step += kStride) {
      if (limits_.done() || (mark_.excess == 0 && mark_.value <= limits_.bound)) return;
      temperature_ = recipe_.hot * std::pow(ratio, static_cast<double>(step) /
                                                       static_cast<double>(recipe_.steps));
      for (i64 i = 0; i < kStride && !limits_.spent(); ++i) one();
    }
    temperature_ = 0;
    for (i64 i = 0; i < 4 * static_cast<i64>(h_.num_items) && !limits_.done(); ++i) one();
  }
  const std::vector<i32>& best() const { return best_; }
  const Mark& mark() const { return mark_; }

 private:
  double score(i32 d, i64 load, i64 held) const {
    double x = static_cast<double>(load) * scale_;
    for (i32 i = 0; i < recipe_.doublings; ++i) x *= x;
    if (d < h_.accelerators && held > h_.memory)
      x += recipe_.memory_weight * (0.02 + static_cast<double>(held - h_.memory) * memory_);
    return x;
  }
  double score(i32 d) const { return score(d, s_.load()[d], s_.held()[d]); }
  bool allowed(i32 v, i32 d) const { return d >= h_.accelerators || h_.can_accelerate[v]; }

  i32 target(i32 v) {
    const i32 a = s_.device()[v];
    const i32 nets = h_.item_ptr[v + 1] - h_.item_ptr[v];
    if (nets && random_.below(4)) {
      const i32 e = h_.item_nets[h_.item_ptr[v] + random_.below(nets)];
      const i32 u = h_.pins[h_.net_ptr[e] + random_.below(h_.net_ptr[e + 1] - h_.net_ptr[e])];
      if (s_.device()[u] != a) return s_.device()[u];
    }
    i32 b = random_.below(h_.devices() - 1);
    return b + (b >= a);
  }
  bool accept(double delta) {
    if (delta <= 0) return true;
    if (temperature_ <= 0 || delta > 30 * temperature_) return false;
    return random_.unit() < std::exp(-delta / temperature_);
  }
  void note() {
    if (!s_.fits() && mark_.excess == 0) return;
    const Mark now{s_.fits() ? 0 : s_.excess(), s_.value()};
    if (now < mark_) mark_ = now, best_ = s_.device();
  }

  void one() {
    const i32 v = random_.below(h_.num_items);
    const u64 kind = random_.next() & 15;
    if (kind < 8) single(v);
    else if (kind < 12) swap(v);
    else if (kind < 14) run_of(v);
    else cluster(v);
  }
  void single(i32 v) {
    const i32 a = s_.device()[v], b = target(v);
    if (!allowed(v, b)) return;
    ++limits_.evaluations;
    i64 load_a, load_b;
    s_.peek(v, b, load_a, load_b);
    const double delta = score(a, load_a, s_.held()[a] - h_.size[v]) +
                         score(b, load_b, s_.held()[b] + h_.size[v]) - score(a) - score(b);
    if (!accept(delta)) return;
    s_.move(v, b, load_a, load_b);
    note();
  }
  void swap(i32 v) {
    const i32 w = random_.below(h_.num_items);
    const i32 a = s_.device()[v], b = s_.device()[w];
    if (a == b || !allowed(v, b) || !allowed(w, a)) return;
    ++limits_.evaluations;
    const double before = score(a) + score(b);
    s_.move(v, b);
    s_.move(w, a);
    if (accept(score(a) + score(b) - before)) return note();
    s_.move(w, b);
    s_.move(v, a);
  }
  void group(i32 a, i32 b) {
    if (a == b) return;
    for (const i32 u : chosen_)
      if (!allowed(u, b)) return;
    ++limits_.evaluations;
    const double before = score(a) + score(b);
    for (const i32 u : chosen_) s_.move(u, b);
    if (accept(score(a) + score(b) - before)) return note();
    for (auto u = chosen_.rbegin(); u != chosen_.rend(); ++u) s_.move(*u, a);
  }
  i32 some_length() {  // short ones most often
    i32 length = 2;
    while (length < h_.num_items && random_.below(3)) length += 1 + random_.below(length);
    return length;
  }
  void run_of(i32 v) {
    const i32 a = s_.device()[v], n = static_cast<i32>(h_.order.size());
    const i32 length = some_length(), step = random_.below(2) ? 1 : -1;
    chosen_.clear();
    i32 i = rank_[v];
    for (; i >= 0 && i < n && static_cast<i32>(chosen_.size()) < length; i += step)
      if (s_.device()[h_.order[i]] == a) chosen_.push_back(h_.order[i]);
    i32 b = target(v);
    const i32 behind = rank_[v] - step;
    if (random_.below(2) && behind >= 0 && behind < n) b = s_.device()[h_.order[behind]];
    group(a, b);
  }
  void cluster(i32 v) {
    const i32 a = s_.device()[v], b = target(v), length = some_length();
    chosen_.assign(1, v);
    if (in_.empty()) in_.assign(h_.num_items, 0);
    in_[v] = 1;
    for (std::size_t head = 0; head < chosen_.size(); ++head) {
      const i32 u = chosen_[head];
      for (i32 y = h_.item_ptr[u]; y < h_.item_ptr[u + 1]; ++y) {
        const i32 e = h_.item_nets[y];
        if (random_.below(4) == 0) continue;
        for (i32 x = h_.net_ptr[e]; x < h_.net_ptr[e + 1]; ++x) {
          const i32 w = h_.pins[x];
          if (static_cast<i32>(chosen_.size()) >= length) goto full;
          if (!in_[w] && s_.device()[w] == a) in_[w] = 1, chosen_.push_back(w);
        }
      }
    }
  full:
    for (const i32 u : chosen_) in_[u] = 0;
    group(a, b);
  }

  State& s_;
  const Hypergraph& h_;
  Random& random_;
  Limits& limits_;
  Recipe recipe_;
  double scale_, memory_, temperature_ = 0;
  std::vector<i32> rank_, chosen_, best_;
  std::vector<u8> in_;
  Mark mark_;
};

}  // namespace devplace_load

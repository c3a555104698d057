// Anytime search for the smallest largest load: annealing on many levels of coarsening, started
// afresh, from good placements, and from what two good placements have in common.
#pragma once

#include <mutex>

#include "anneal.hpp"
#include "../threads.hpp"

namespace devplace_load {

struct Found {
  std::vector<i32> device;
  Mark mark;
};

class Pool {  // the best distinct placements; shared by the threads
 public:
  explicit Pool(std::size_t size) : size_(size) {}
  void add(const std::vector<i32>& device, const Mark& mark) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Found& f : found_)
      if (f.mark == mark) return;
    found_.push_back({device, mark});
    std::sort(found_.begin(), found_.end(),
              [](const Found& x, const Found& y) { return x.mark < y.mark; });
    if (found_.size() > size_) found_.pop_back();
  }
  std::size_t size() {
    std::lock_guard<std::mutex> lock(mutex_);
    return found_.size();
  }
  Found at(std::size_t i) {
    std::lock_guard<std::mutex> lock(mutex_);
    return found_[std::min(i, found_.size() - 1)];
  }

 private:
  std::mutex mutex_;
  std::size_t size_;
  std::vector<Found> found_;
};

class Searcher {
 public:
  Searcher(const Hypergraph& h, Pool& pool, u64 seed, const Limits& limits)
      : h_(h), pool_(pool), random_(seed), limits_(limits) {
    i64 work = 0;
    for (i32 v = 0; v < h.num_items; ++v) work += h.accelerator[v];
    share_ = work / std::max(1, h.accelerators) + 1;
  }

  i64 run() {
    for (i64 round = 0; !over(); ++round) {
      ++limits_.evaluations;  // of the round itself, so that rounds without moves end too
      const i32 stage = static_cast<i32>(std::min<i64>(round / 6, 9));
      if (random_.below(2) || round < 8) doublings_ = 3 + random_.below(7), cold_ = some_cold();
      else doublings_ = good_doublings_, cold_ = good_cold_;
      effort_ = 4.0 * std::exp2(random_.unit() * (2 + stage));
      const std::size_t known = pool_.size();
      const double draw = random_.unit();
      if (known < 3 || draw < 0.25) fresh();
      else if (draw < 0.6) again(pick(known));
      else if (draw < 0.85) common(pick(known), pick(known));
      else flat(pick(known));
    }
    return limits_.evaluations;
  }

 private:
  bool over() {
    if (limits_.done()) return true;
    return pool_.size() && pool_.at(0).mark.excess == 0 && pool_.at(0).mark.value <= limits_.bound;
  }
  Found pick(std::size_t known) {
    const double u = random_.unit();
    return pool_.at(static_cast<std::size_t>(u * u * static_cast<double>(known)));
  }
  i64 scale() {
    const i64 best = pool_.size() ? pool_.at(0).mark.value : INT64_MAX;
    return best == INT64_MAX ? share_ : best;
  }
  Recipe recipe(i32 items, double temperature) {
    Recipe r;
    r.doublings = doublings_;
    const double steepness = std::exp2(r.doublings);
    r.hot = temperature * steepness * 0.05 * std::exp2(2 * random_.unit() - 1);
    r.cold = steepness * cold_;
    if (r.hot < r.cold) r.hot = r.cold;
    r.memory_weight = memory_weight_;
    r.steps = static_cast<i64>(effort_ * items * std::max(2, std::min(h_.devices(), 16)));
    return r;
  }
  std::vector<i32> random_device(const Hypergraph& h) {
    std::vector<i32> device(h.num_items);
    for (i32 v = 0; v < h.num_items; ++v) {
      const bool cpu = !h.can_accelerate[v] || h.accelerators == 0;
      device[v] = cpu ? h.accelerators + random_.below(h.cpus) : random_.below(h.accelerators);
    }
    return device;
  }

  void fresh() { levels(nullptr, nullptr, 1.0); }
  void again(const Found& from) { levels(&from.device, &from.device, 0.02 + 0.3 * random_.unit()); }
  void common(const Found& a, const Found& b) {
    std::vector<i32> both(h_.num_items);
    for (i32 v = 0; v < h_.num_items; ++v) both[v] = a.device[v] * h_.devices() + b.device[v];
    levels(&a.device, &both, 0.02 + 0.5 * random_.unit());
  }
  void flat(const Found& from) {
    std::vector<i32> device = from.device;
    anneal(h_, device, 0.02 + 0.2 * random_.unit());
    keep(device);
  }

  // Coarsens (only within equal labels), anneals the coarsest level and each finer one.
  void levels(const std::vector<i32>* start, const std::vector<i32>* labels, double temperature) {
    std::vector<Hypergraph> levels(1, h_);
    std::vector<std::vector<i32>> groups;
    std::vector<i32> label = labels ? *labels : std::vector<i32>(h_.num_items, 0);
    std::vector<i32> device = start ? *start : std::vector<i32>();
    const i64 heaviest = static_cast<i64>(static_cast<double>(share_) * (0.1 + 0.6 * random_.unit()));
    const i32 least = std::max(2 * h_.devices(), 12) * (1 + random_.below(4));
    while (levels.back().num_items > least) {
      std::vector<i32> group;
      const i32 count = match(levels.back(), &label, heaviest, random_, group);
      if (count > 0.95 * levels.back().num_items) break;
      std::vector<i32> next_label(count), next_device(count);
      for (i32 v = 0; v < levels.back().num_items; ++v) {
        next_label[group[v]] = label[v];
        if (start) next_device[group[v]] = device[v];
      }
      levels.push_back(contract(levels.back(), group, count));
      groups.push_back(std::move(group));
      label = std::move(next_label);
      device = std::move(next_device);
    }
    if (!start) device = random_device(levels.back());
    for (std::size_t i = levels.size(); i-- > 0;) {
      anneal(levels[i], device, temperature);
      if (i == 0) break;
      std::vector<i32> finer(levels[i - 1].num_items);
      for (std::size_t v = 0; v < finer.size(); ++v) finer[v] = device[groups[i - 1][v]];
      device = std::move(finer);
      temperature *= 0.6;
      if (limits_.done()) temperature = 0;
    }
    keep(device);
  }
  void anneal(const Hypergraph& h, std::vector<i32>& device, double temperature) {
    State state(h, device);
    Annealer annealer(state, random_, limits_, recipe(h.num_items, temperature), scale());
    annealer.run();
    device = annealer.best();
  }
  void keep(const std::vector<i32>& device) {
    State state(h_, device);
    const Mark mark{state.excess(), state.value()};
    memory_weight_ = std::min(1e5, std::max(20.0, memory_weight_ * (mark.excess ? 2.0 : 0.7)));
    if (pool_.size() && mark < pool_.at(0).mark) good_doublings_ = doublings_, good_cold_ = cold_;
    pool_.add(device, mark);
  }
  double some_cold() { return 0.00005 * std::exp2(3.3 * random_.unit()); }

  const Hypergraph& h_;
  Pool& pool_;
  Random random_;
  Limits limits_;
  i64 share_ = 1;
  double effort_ = 4.0, memory_weight_ = 20.0;
  i32 doublings_ = 5, good_doublings_ = 5;  // of the round, and of the last round that found more
  double cold_ = 0.0002, good_cold_ = 0.0002;
};

struct Outcome {
  Found best;
  i64 evaluations = 0;
};

// Runs `threads` searchers on one pool that holds the starts. With one thread and no deadline the
// outcome depends on the seed and the number of evaluations only.
//
// `poll`: see run_threads.
template <class Poll>
Outcome search(const Hypergraph& h, const std::vector<std::vector<i32>>& starts, double seconds,
               i64 max_evaluations, u64 seed, int threads, i64 bound, Poll poll) {
  std::atomic<bool> stop{false};
  Pool pool(16);
  for (const auto& start : starts) {
    State state(h, start);
    pool.add(start, {state.excess(), state.value()});
  }
  Limits limits;
  limits.deadline = devplace::deadline_in(seconds);
  limits.bound = bound;
  limits.stop = &stop;
  std::vector<i64> evaluations(threads, 0);
  devplace::run_threads(threads, stop, poll, [&](int t) {
    Limits own = limits;
    own.max_evaluations = part_of(max_evaluations, threads, t);
    evaluations[t] = Searcher(h, pool, seed * 1000003u + static_cast<u64>(t), own).run();
  });
  Outcome out;
  if (pool.size()) out.best = pool.at(0);
  out.evaluations = std::accumulate(evaluations.begin(), evaluations.end(), i64{0});
  return out;
}

}  // namespace devplace_load

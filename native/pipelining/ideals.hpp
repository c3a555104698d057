// Best contiguous split: a dynamic programme over down-sets (ideals) of the precedence order.
//
// Source: Tarnawski et al. (2020), arXiv 2006.16423, section 5.1. Differs from it in: a branch is
// cut off once its work alone exceeds a known value, and where there are too many ideals only those
// on many topological orders are used (`complete` is then false).
#pragma once

#include <chrono>

#include "hypergraph.hpp"

namespace devplace_load {

struct Lattice {  // ideals by rising size; `up` joins each to those with one item more
  std::vector<i32> ptr, item, to;
  i32 count = 0;
  bool complete = true;
};

class LatticeBuilder {
 public:
  LatticeBuilder(i32 n, const std::vector<i32>& src, const std::vector<i32>& dst)
      : n_(n), after_(n), before_(n, 0), words_((n + 63) / 64) {
    for (std::size_t i = 0; i < src.size(); ++i) after_[src[i]].push_back(dst[i]), ++before_[dst[i]];
    Random random(7);
    for (i32 v = 0; v < n; ++v) key_.push_back({random.next(), random.next()});
  }

  // All ideals, or, above the limit, those on `orders` topological orders.
  Lattice build(i32 limit, i32 orders) {
    ids_.clear(), edges_.clear(), size_.clear();
    if (limit > 0 && all(limit)) return finish(true);
    ids_.clear(), edges_.clear(), size_.clear();
    Random random(11);
    id({0, 0}, 0);
    for (i32 i = 0; i < orders; ++i) walk(random, i % 3);
    return finish(false);
  }

 private:
  using Key = std::pair<u64, u64>;
  struct Hash {
    std::size_t operator()(const Key& k) const { return k.first ^ (k.second * 3); }
  };
  struct Edge {
    i32 from, item, to;
  };

  i32 id(const Key& key, i32 size) {
    const auto [at, fresh] = ids_.try_emplace(key, static_cast<i32>(size_.size()));
    if (fresh) size_.push_back(size);
    return at->second;
  }
  Key with(const Key& key, i32 v) const {
    return {key.first ^ key_[v].first, key.second ^ key_[v].second};
  }

  bool all(i32 limit) {
    struct Open {
      std::vector<u64> members;
      Key key;
    };
    std::vector<Open> level(1, {std::vector<u64>(words_, 0), {0, 0}}), next;
    id({0, 0}, 0);
    for (i32 size = 0; size < n_; ++size) {
      next.clear();
      for (const Open& open : level) {
        const i32 from = ids_.at(open.key);
        std::vector<i32> missing = before_;
        for (i32 v = 0; v < n_; ++v)
          if (open.members[v / 64] >> (v % 64) & 1)
            for (const i32 w : after_[v]) --missing[w];
        for (i32 v = 0; v < n_; ++v) {
          if (missing[v] || (open.members[v / 64] >> (v % 64) & 1)) continue;
          const Key key = with(open.key, v);
          const std::size_t known = size_.size();
          const i32 to = id(key, size + 1);
          edges_.push_back({from, v, to});
          if (size_.size() == known) continue;
          if (static_cast<i32>(known) >= limit) return false;
          next.push_back({open.members, key});
          next.back().members[v / 64] |= u64{1} << (v % 64);
        }
      }
      std::swap(level, next);
    }
    return true;
  }

  void walk(Random& random, i32 kind) {  // 0: depth first, 1: breadth first, 2: any order
    std::vector<i32> missing = before_, ready;
    for (i32 v = 0; v < n_; ++v)
      if (!missing[v]) ready.push_back(v);
    Key key{0, 0};
    for (i32 size = 0; size < n_; ++size) {
      const i32 last = static_cast<i32>(ready.size()) - 1;
      std::size_t at = kind == 0 ? last : kind == 1 ? 0 : random.below(last + 1);
      if (kind < 2 && last > 0 && random.below(4) == 0) at = random.below(last + 1);
      const i32 v = ready[at];
      ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
      for (const i32 w : after_[v])
        if (--missing[w] == 0) ready.push_back(w);
      const i32 from = id(key, size);
      key = with(key, v);
      edges_.push_back({from, v, id(key, size + 1)});
    }
  }

  Lattice finish(bool complete) {  // renumber by size, so that supersets come later
    std::vector<i32> sorted(size_.size()), rank(size_.size());
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(), [&](i32 a, i32 b) { return size_[a] < size_[b]; });
    for (std::size_t i = 0; i < sorted.size(); ++i) rank[sorted[i]] = static_cast<i32>(i);
    for (Edge& e : edges_) e.from = rank[e.from], e.to = rank[e.to];
    auto less = [](const Edge& a, const Edge& b) {
      return a.from != b.from ? a.from < b.from : a.to < b.to;
    };
    std::sort(edges_.begin(), edges_.end(), less);
    Lattice out;
    out.count = static_cast<i32>(size_.size());
    out.complete = complete;
    out.ptr.assign(out.count + 1, 0);
    for (std::size_t i = 0; i < edges_.size(); ++i) {
      const Edge& e = edges_[i];
      if (i && edges_[i - 1].from == e.from && edges_[i - 1].to == e.to) continue;
      ++out.ptr[e.from + 1];
      out.item.push_back(e.item);
      out.to.push_back(e.to);
    }
    std::partial_sum(out.ptr.begin(), out.ptr.end(), out.ptr.begin());
    return out;
  }

  i32 n_;
  std::vector<std::vector<i32>> after_;
  std::vector<i32> before_;
  i32 words_;
  std::vector<Key> key_;
  std::unordered_map<Key, i32, Hash> ids_;
  std::vector<i32> size_;
  std::vector<Edge> edges_;
};

class ContiguousSplit {
 public:
  ContiguousSplit(const Hypergraph& h, const Lattice& lattice) : h_(h), l_(lattice) {
    states_ = (h.accelerators + 1) * (h.cpus + 1);
  }

  // Smallest largest load below `upper`; true when the programme ran to its end in time.
  bool run(i64 upper, std::chrono::steady_clock::time_point deadline) {
    upper_ = upper;
    best_.assign(static_cast<std::size_t>(l_.count) * states_, INT64_MAX);
    from_.assign(best_.size(), -1);
    best_[0] = 0;
    seen_.assign(l_.count, -1);
    inside_.assign(h_.num_nets(), 0);
    for (i32 ideal = 0; ideal < l_.count; ++ideal) {
      const i64* row = &best_[static_cast<std::size_t>(ideal) * states_];
      if (*std::min_element(row, row + states_) >= upper_) continue;
      if ((ideal & 15) == 0 && std::chrono::steady_clock::now() > deadline) return false;
      extend(ideal);
    }
    return true;
  }

  // Device of each item; empty when no split was found.
  std::vector<i32> split(i64& value) const {
    const std::size_t last = static_cast<std::size_t>(l_.count - 1) * states_;
    std::size_t at = last;
    for (std::size_t s = last; s < last + states_; ++s)
      if (best_[s] < best_[at]) at = s;
    value = best_[at];
    if (value == INT64_MAX) return {};
    std::vector<i32> device(h_.num_items, -1);
    while (at >= static_cast<std::size_t>(states_)) {
      const std::size_t before = static_cast<std::size_t>(from_[at]);
      const i32 state = static_cast<i32>(before % states_);
      const bool cpu = h_.cpus > 0 && static_cast<i32>(at % states_) == state + 1;
      const i32 d = cpu ? h_.accelerators + state % (h_.cpus + 1) : state / (h_.cpus + 1);
      assign(static_cast<i32>(before / states_), static_cast<i32>(at / states_), d, device);
      at = before;
    }
    return device;
  }

 private:
  // States count used accelerators and CPUs: state = accelerators * (cpus + 1) + cpus.
  void relax(i32 from, i32 to, i64 accelerator, i64 cpu) {
    const i32 C = h_.cpus + 1;
    const i64* before = &best_[static_cast<std::size_t>(from) * states_];
    i64* after = &best_[static_cast<std::size_t>(to) * states_];
    i64* origin = &from_[static_cast<std::size_t>(to) * states_];
    for (i32 s = 0; s < states_; ++s) {
      if (before[s] >= upper_) continue;
      const i64 came = static_cast<i64>(from) * states_ + s;
      if (s / C < h_.accelerators && accelerator < upper_) {
        const i64 value = std::max(before[s], accelerator);
        if (value < after[s + C]) after[s + C] = value, origin[s + C] = came;
      }
      if (s % C < h_.cpus && cpu < upper_) {
        const i64 value = std::max(before[s], cpu);
        if (value < after[s + 1]) after[s + 1] = value, origin[s + 1] = came;
      }
    }
  }

  struct Frame {
    i32 ideal, next, item;
  };
  void extend(i32 root) {  // every superset once, its load kept up to date along the way
    std::vector<Frame> stack(1, {root, l_.ptr[root], -1});
    seen_[root] = root;
    while (!stack.empty()) {
      Frame& top = stack.back();
      if (top.next == l_.ptr[top.ideal + 1]) {
        if (top.item >= 0) change(top.item, -1);
        stack.pop_back();
        continue;
      }
      const i32 x = top.next++, to = l_.to[x], v = l_.item[x];
      if (seen_[to] == root) continue;
      seen_[to] = root;
      change(v, 1);
      const bool fits = !unable_ && size_ <= h_.memory && work_ < upper_ && h_.accelerators > 0;
      const bool serial = h_.cpus > 0 && cpu_ < upper_;
      if (!fits && !serial) {
        change(v, -1);
        continue;
      }
      relax(root, to, fits ? work_ + moved_ : INT64_MAX, serial ? cpu_ : INT64_MAX);
      stack.push_back({to, l_.ptr[to], v});
    }
  }
  void change(i32 v, i32 sign) {
    work_ += sign * h_.accelerator[v];
    cpu_ += sign * h_.cpu[v];
    size_ += sign * h_.size[v];
    unable_ += sign * !h_.can_accelerate[v];
    for (i32 y = h_.item_ptr[v]; y < h_.item_ptr[v + 1]; ++y) {
      const i32 e = h_.item_nets[y], pins = h_.net_ptr[e + 1] - h_.net_ptr[e];
      const bool paid = inside_[e] > 0 && inside_[e] < pins;
      inside_[e] += sign;
      const bool pays = inside_[e] > 0 && inside_[e] < pins;
      moved_ += (static_cast<i64>(pays) - static_cast<i64>(paid)) * h_.cost[e];
    }
  }
  // Items between two ideals, found by walking up from the lower one.
  void assign(i32 low, i32 high, i32 d, std::vector<i32>& device) const {
    std::vector<i32> came_item(l_.count, -1), came_from(l_.count, -1), queue(1, low);
    for (std::size_t head = 0; head < queue.size() && came_item[high] < 0; ++head)
      for (i32 x = l_.ptr[queue[head]]; x < l_.ptr[queue[head] + 1]; ++x)
        if (came_item[l_.to[x]] < 0) {
          came_item[l_.to[x]] = l_.item[x];
          came_from[l_.to[x]] = queue[head];
          queue.push_back(l_.to[x]);
        }
    for (i32 at = high; at != low; at = came_from[at]) device[came_item[at]] = d;
  }

  const Hypergraph& h_;
  const Lattice& l_;
  i32 states_ = 1;
  i64 upper_ = INT64_MAX;
  std::vector<i64> best_, from_;
  std::vector<i32> seen_, inside_;
  i64 work_ = 0, cpu_ = 0, size_ = 0, moved_ = 0;
  i32 unable_ = 0;
};

}  // namespace devplace_load

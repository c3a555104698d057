// Python face of the max-load solvers: devplace.pipelining._solvers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "block.hpp"
#include "cut.hpp"
#include "ideals.hpp"
#include "../numpy.hpp"
#include "search.hpp"

namespace nb = nanobind;
using namespace devplace_load;

namespace {

Hypergraph read(const nb::object& items) {
  Hypergraph h;
  h.accelerator = copy<i64>(items, "accelerator_ps");
  h.cpu = copy<i64>(items, "cpu_ps");
  h.size = copy<i64>(items, "size_bytes");
  h.can_accelerate = copy<u8>(items, "can_accelerate");
  h.net_ptr = copy<i32>(items, "net_ptr");
  h.pins = copy<i32>(items, "pins");
  h.cost = copy<i64>(items, "net_ps");
  h.order = copy<i32>(items, "order");
  h.num_items = static_cast<i32>(h.accelerator.size());
  h.accelerators = nb::cast<i32>(items.attr("num_accelerators"));
  h.cpus = nb::cast<i32>(items.attr("num_cpus"));
  h.memory = nb::cast<i64>(items.attr("memory_bytes"));
  h.index_nets();
  return h;
}

nb::tuple run_search(nb::object items, In<i32> starts, double seconds, i64 max_evaluations,
                     u64 seed, int threads, i64 bound) {
  const Hypergraph h = read(items);
  const std::size_t n = h.num_items;
  std::vector<std::vector<i32>> given;
  for (std::size_t i = 0; n && i + n <= starts.size(); i += n)
    given.emplace_back(starts.data() + i, starts.data() + i + n);
  for (const auto& start : given)
    for (const i32 d : start)
      if (d < 0 || d >= h.devices()) throw nb::value_error("starts: index out of range");
  Outcome out;
  bool interrupted = false;
  {
    nb::gil_scoped_release release;
    out = search(h, given, seconds, max_evaluations, seed, std::max(1, threads), bound, [&] {
      nb::gil_scoped_acquire acquire;
      return interrupted = interrupted || PyErr_CheckSignals() != 0;
    });
  }
  if (interrupted) throw nb::python_error();
  return nb::make_tuple(vector_to_numpy(out.best.device), out.best.mark.excess, out.best.mark.value,
                        out.evaluations);
}

// Best contiguous split over the blocks of the items, and whether all contiguous splits were tried.
nb::tuple contiguous(nb::object items, i32 max_ideals, double seconds, i64 upper) {
  const Hypergraph fine = read(items);
  const std::vector<i32> block = copy<i32>(items, "block");
  std::vector<i32> src = copy<i32>(items, "before_src"), dst = copy<i32>(items, "before_dst");
  for (i32& v : src) v = block[v];
  for (i32& v : dst) v = block[v];
  i64 value = INT64_MAX;
  bool complete = false;
  std::vector<i32> device;
  {
    nb::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    const auto deadline = devplace::deadline_in(seconds);
    const i32 count = block.empty() ? 0 : *std::max_element(block.begin(), block.end()) + 1;
    const Hypergraph h = contract(fine, block, count);
    LatticeBuilder builder(count, src, dst);
    for (const i32 limit : {max_ideals, 0}) {
      const Lattice lattice = builder.build(limit, 24);
      ContiguousSplit programme(h, lattice);
      const bool ended = programme.run(upper, deadline + (limit ? 0 : 1) * (deadline - start));
      const std::vector<i32> split = programme.split(value);
      complete = ended && lattice.complete;
      device.assign(split.empty() ? 0 : block.size(), 0);
      for (std::size_t v = 0; v < device.size(); ++v) device[v] = split[block[v]];
      if (ended || !lattice.complete) break;
    }
  }
  return nb::make_tuple(vector_to_numpy(device), value, complete);
}

// Least load of an accelerator that holds one of the items, for the items asked for.
i64 least_load(nb::object items, i32 item) {
  const Hypergraph h = read(items);
  if (item < 0 || item >= h.num_items) throw nb::value_error("item: index out of range");
  nb::gil_scoped_release release;
  return MinCut(h).least_load(item);
}

// Largest over all items of the least load of any device that holds the item; stops at `seconds`.
i64 item_bound(nb::object items, double seconds) {
  const Hypergraph h = read(items);
  nb::gil_scoped_release release;
  const auto deadline = devplace::deadline_in(seconds);
  std::vector<std::pair<i64, i32>> most(h.num_items);
  for (i32 v = 0; v < h.num_items; ++v) {
    i64 alone = h.accelerator[v];
    for (i32 y = h.item_ptr[v]; y < h.item_ptr[v + 1]; ++y) alone += h.cost[h.item_nets[y]];
    if (!h.can_accelerate[v] || h.size[v] > h.memory || !h.accelerators) alone = INT64_MAX;
    if (h.cpus) alone = std::min(alone, h.cpu[v]);
    most[v] = {alone, v};
  }
  std::sort(most.rbegin(), most.rend());
  MinCut cut(h);
  i64 bound = 0;
  for (const auto& [alone, v] : most) {
    if (alone <= bound || std::chrono::steady_clock::now() > deadline) break;
    const bool able = h.can_accelerate[v] && h.size[v] <= h.memory && h.accelerators;
    i64 least = able ? cut.least_load(v) : alone;
    if (h.cpus) least = std::min(least, h.cpu[v]);
    if (least != INT64_MAX) bound = std::max(bound, least);
  }
  return bound;
}

BlockGraph read_blocks(const nb::object& graph) {
  BlockGraph g;
  g.accelerator = copy<i64>(graph, "accelerator_ps");
  g.cpu = copy<i64>(graph, "cpu_ps");
  g.size = copy<i64>(graph, "size_bytes");
  g.cost = copy<i64>(graph, "producer_ps");
  g.can_accelerate = copy<u8>(graph, "can_accelerate");
  g.item = copy<i32>(graph, "item");
  g.order = copy<i32>(graph, "order");
  g.in_ptr = copy<i32>(graph, "in_ptr");
  g.in = copy<i32>(graph, "sources");
  g.out_ptr = copy<i32>(graph, "out_ptr");
  g.out = copy<i32>(graph, "targets");
  g.accelerators = nb::cast<i32>(graph.attr("num_accelerators"));
  g.devices = nb::cast<i32>(graph.attr("num_devices"));
  g.memory = nb::cast<i64>(graph.attr("memory_bytes"));
  g.num_nodes = static_cast<i32>(g.item.size());
  g.num_items = g.item.empty() ? 0 : *std::max_element(g.item.begin(), g.item.end()) + 1;
  g.item_ptr.assign(g.num_items + 1, 0);
  for (const i32 i : g.item) ++g.item_ptr[i + 1];
  std::partial_sum(g.item_ptr.begin(), g.item_ptr.end(), g.item_ptr.begin());
  std::vector<i32> next(g.item_ptr.begin(), g.item_ptr.end() - 1);
  g.members.resize(g.item.size());
  for (const i32 v : g.order) g.members[next[g.item[v]]++] = v;
  return g;
}

i64 block_latency(nb::object graph, In<i32> device) {
  const BlockGraph g = read_blocks(graph);
  if (static_cast<i32>(device.size()) != g.num_nodes) throw nb::value_error("device: wrong size");
  return BlockEvaluator(g).run(std::vector<i32>(device.data(), device.data() + device.size()));
}

nb::tuple search_blocks(nb::object graph, In<i32> starts, double seconds, i64 max_evaluations,
                        u64 seed, int threads, i64 bound) {
  const BlockGraph g = read_blocks(graph);
  const std::size_t n = g.num_items;
  std::vector<std::vector<i32>> given;
  for (std::size_t i = 0; n && i + n <= starts.size(); i += n)
    given.emplace_back(starts.data() + i, starts.data() + i + n);
  if (given.empty()) throw nb::value_error("starts: at least one is needed");
  for (const auto& start : given)
    for (const i32 d : start)
      if (d < 0 || d >= g.devices) throw nb::value_error("starts: index out of range");
  threads = std::max(1, threads);
  std::atomic<bool> stop{false};
  Limits limits;
  limits.deadline = devplace::deadline_in(seconds);
  limits.bound = bound;
  limits.stop = &stop;
  std::vector<Found> found(threads);
  std::vector<i64> evaluations(threads, 0);
  bool interrupted = false;
  {
    nb::gil_scoped_release release;
    const auto poll = [&] {
      nb::gil_scoped_acquire acquire;
      return interrupted = interrupted || PyErr_CheckSignals() != 0;
    };
    devplace::run_threads(threads, stop, poll, [&](int t) {
      Limits own = limits;
      own.max_evaluations = part_of(max_evaluations, threads, t);
      BlockSearcher searcher(g, seed * 1000003u + static_cast<u64>(t), own);
      searcher.run(given);
      found[t] = {searcher.best(), searcher.mark()};
      evaluations[t] = searcher.evaluations();
    });
  }
  if (interrupted) throw nb::python_error();
  const Found& best = *std::min_element(
      found.begin(), found.end(), [](const Found& a, const Found& b) { return a.mark < b.mark; });
  return nb::make_tuple(vector_to_numpy(best.device), best.mark.excess, best.mark.value,
                        std::accumulate(evaluations.begin(), evaluations.end(), i64{0}));
}

}  // namespace

NB_MODULE(_solvers, m) {
  m.doc() = "Solvers of the max-load problem.";
  m.def("search", &run_search, nb::arg("items"), nb::arg("starts"), nb::arg("seconds"),
        nb::arg("max_evaluations"), nb::arg("seed"), nb::arg("threads"), nb::arg("bound"));
  m.def("contiguous", &contiguous, nb::arg("items"), nb::arg("max_ideals"), nb::arg("seconds"),
        nb::arg("upper"));
  m.def("least_load", &least_load, nb::arg("items"), nb::arg("item"));
  m.def("item_bound", &item_bound, nb::arg("items"), nb::arg("seconds"));
  m.def("block_latency", &block_latency, nb::arg("graph"), nb::arg("device"));
  m.def("search_blocks", &search_blocks, nb::arg("graph"), nb::arg("starts"), nb::arg("seconds"),
        nb::arg("max_evaluations"), nb::arg("seed"), nb::arg("threads"), nb::arg("bound"));
}

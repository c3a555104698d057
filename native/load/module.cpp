// Python face of the max-load solvers: devplace.load._solvers.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "search.hpp"

namespace nb = nanobind;
using namespace devplace_load;

template <class T>
using In = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

namespace {

template <class T>
std::vector<T> copy(const nb::object& owner, const char* name) {
  auto array = nb::cast<In<T>>(owner.attr(name));
  return std::vector<T>(array.data(), array.data() + array.size());
}

nb::object to_numpy(const std::vector<i32>& v) {
  i32* memory = new i32[std::max<std::size_t>(1, v.size())];
  std::copy(v.begin(), v.end(), memory);
  nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<i32*>(p); });
  const std::size_t shape[1] = {v.size()};
  return nb::cast(nb::ndarray<nb::numpy, i32>(memory, 1, shape, owner));
}

Hyper read(const nb::object& items) {
  Hyper h;
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
  const Hyper h = read(items);
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
  return nb::make_tuple(to_numpy(out.best.device), out.best.mark.excess, out.best.mark.value,
                        out.evaluations);
}

}  // namespace

NB_MODULE(_solvers, m) {
  m.doc() = "Solvers of the max-load problem.";
  m.def("search", &run_search, nb::arg("items"), nb::arg("starts"), nb::arg("seconds"),
        nb::arg("max_evaluations"), nb::arg("seed"), nb::arg("threads"), nb::arg("bound"));
}

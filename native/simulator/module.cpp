// Python face of the simulator: devplace.simulator._native.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstring>
#include <memory>

#include "../numpy.hpp"
#include "../search/anneal.hpp"
#include "../threads.hpp"
#include "kernel.hpp"

namespace nb = nanobind;
using namespace devplace;

namespace {

class Kernel {
 public:
  Kernel(nb::object tasks, nb::object wires) {
    core_.is_source = copy<u8>(tasks, "is_source");
    core_.storage_held = copy<u8>(tasks, "storage_held");
    core_.fixed_buffers = copy<u8>(wires, "fixed_buffers");
    core_.held_bytes = copy<i64>(wires, "held_bytes");
    core_.storage_over = copy<i32>(tasks, "storage_over");
    core_.workspace_bytes = copy<i64>(tasks, "workspace_bytes");
    core_.carrier_bytes = copy<i64>(tasks, "carrier_bytes");
    core_.storage_bytes = copy<i64>(tasks, "storage_bytes");
    core_.const_bytes = copy<i64>(tasks, "const_bytes");
    core_.out_ptr = copy<i32>(tasks, "out_ptr");
    core_.carrier_storage = copy<i32>(tasks, "carrier_storage");
    core_.cons_ptr = copy<i32>(tasks, "cons_ptr");
    core_.cons = copy<i32>(tasks, "cons");
    core_.in_ptr = copy<i32>(tasks, "in_ptr");
    core_.in_carrier = copy<i32>(tasks, "in_carrier");
    core_.storage_ptr = copy<i32>(tasks, "storage_ptr");
    core_.const_ptr = copy<i32>(tasks, "const_ptr");
    core_.const_user = copy<i32>(tasks, "const_user");
    core_.duration_ns = copy<i64>(wires, "duration_ns");
    const nb::object transfers = wires.attr("transfers");
    core_.latency_ns = copy<i64>(transfers, "latency_ns");
    core_.link_class = copy<i32>(transfers, "link_class");
    core_.channel_ptr = copy<i32>(transfers, "channel_ptr");
    core_.channel = copy<i32>(transfers, "channel");
    core_.streams = copy<i32>(wires, "streams");
    core_.copy_ns = copy<i64>(transfers, "copy_ns");
    core_.pool = copy<i32>(wires, "pool");
    core_.num_channels = nb::cast<i32>(transfers.attr("num_channels"));
    core_.num_pools = static_cast<i32>(copy<i64>(wires, "pool_limit_bytes").size());
    set_prices(transfers);
    core_.derive();
  }

  nb::object priority(In<i32> device) const {
    check_devices(device, 1);
    std::vector<i64> length(core_.num_tasks);
    {
      nb::gil_scoped_release release;
      critical_path(core_, device.data(), length.data());
    }
    return vector_to_numpy(length);
  }

  // `turn` has a number for each task, or none: then no device waits.
  nb::tuple trace(In<i32> device, In<i64> priority, In<i64> turn) const {
    check_devices(device, 1);
    check_priorities(priority, 1);
    if (turn.size()) check_priorities(turn, 1);
    Outcome out;
    {
      nb::gil_scoped_release release;
      Simulator(core_).run<true, true>(device.data(), priority.data(), turn.size() ? turn.data() : nullptr, out);
    }
    static_assert(sizeof(Transfer) == 6 * sizeof(i64) && sizeof(MemoryStep) == 3 * sizeof(i64));
    return nb::make_tuple(
        vector_to_numpy(out.start), vector_to_numpy(out.finish), vector_to_numpy(out.sequence),
        out.makespan, vector_to_numpy(out.peak), vector_to_numpy(out.pool_peak),
        vector_to_numpy(out.busy),
        to_numpy(reinterpret_cast<const i64*>(out.transfers.data()), out.transfers.size(), 6),
        to_numpy(reinterpret_cast<const i64*>(out.memory.data()), out.memory.size(), 3));
  }

  // Makespan and peaks of each row of `devices`; `priorities` has one row for all, one row each,
  // or none: then each placement gets its critical-path priority. With `in_turn` devices keep to
  // their priorities, and wait.
  nb::tuple evaluate(In<i32> devices, In<i64> priorities, bool in_turn, bool track_memory, int threads) const {
    const std::size_t rows = devices.ndim() == 2 ? devices.shape(0) : 1;
    check_devices(devices, rows);
    const std::size_t tasks = core_.num_tasks;
    if (priorities.size() && priorities.size() != tasks) check_priorities(priorities, rows);
    const std::size_t priority_rows = tasks ? priorities.size() / tasks : 0;
    const std::size_t D = core_.num_devices, P = core_.num_pools;
    std::vector<i64> makespan(rows), moved(rows), peak(rows * D), pool_peak(rows * P);
    {
      nb::gil_scoped_release release;
      std::atomic<std::size_t> next{0};
      auto work = [&](int) {
        Simulator simulator(core_);
        Outcome out;
        std::vector<i64> own(priority_rows ? 0 : core_.num_tasks);
        for (std::size_t i; (i = next++) < rows;) {
          const i32* device = devices.data() + i * core_.num_tasks;
          const i64* priority = own.data();
          if (priority_rows)
            priority = priorities.data() + (priority_rows > 1 ? i * core_.num_tasks : 0);
          else
            critical_path(core_, device, own.data());
          const i64* turn = in_turn ? priority : nullptr;
          if (track_memory) simulator.run<true, false>(device, priority, turn, out);
          else simulator.run<false, false>(device, priority, turn, out);
          makespan[i] = out.makespan;
          moved[i] = out.transfer_bytes;
          std::copy(out.peak.begin(), out.peak.end(), peak.begin() + i * D);
          std::copy(out.pool_peak.begin(), out.pool_peak.end(), pool_peak.begin() + i * P);
        }
      };
      const int count = std::max(1, std::min<int>(threads, static_cast<int>(rows)));
      std::atomic<bool> stop{false};
      if (count == 1) work(0);
      else run_threads(count, stop, [] { return false; }, work);
    }
    return nb::make_tuple(vector_to_numpy(makespan), to_numpy(peak.data(), rows, D == 1 ? 1 : D),
                          to_numpy(pool_peak.data(), rows, P == 1 ? 1 : P), vector_to_numpy(moved));
  }

  // Step times of moves of some tasks, each from the same placement, and what simulating them took.
  nb::tuple moves(In<i32> device, In<i32> move_ptr, In<i32> move_task, In<i32> move_device,
                  In<i64> cutoff) const {
    check_devices(device, 1);
    check_devices_of(move_device);
    for (std::size_t j = 0; j < move_task.size(); ++j)
      if (move_task.data()[j] < 0 || move_task.data()[j] >= core_.num_tasks)
        throw nb::value_error("moves: task out of range");
    if (cutoff.size() + 1 != move_ptr.size() || move_task.size() != move_device.size())
      throw nb::value_error("moves: wrong size");
    const std::size_t count = cutoff.size();
    for (std::size_t k = 0; k < count; ++k)
      if (move_ptr.data()[k] < 0 || move_ptr.data()[k] > move_ptr.data()[k + 1])
        throw nb::value_error("moves: pointers must rise");
    if (move_ptr.data()[count] != static_cast<i32>(move_task.size()))
      throw nb::value_error("moves: wrong size");
    std::vector<i64> found(count);
    i64 events = 0;
    {
      nb::gil_scoped_release release;
      Incremental incremental(core_);
      incremental.reset(std::vector<i32>(device.data(), device.data() + device.size()));
      std::vector<std::pair<i32, i32>> moved;
      const i64 before = incremental.num_events();
      for (std::size_t k = 0; k < count; ++k) {
        moved.clear();
        for (i32 j = move_ptr.data()[k]; j < move_ptr.data()[k + 1]; ++j)
          moved.push_back({move_task.data()[j], move_device.data()[j]});
        found[k] = incremental.try_move(moved, cutoff.data()[k]);
        incremental.reject();
      }
      events = incremental.num_events() - before;
    }
    return nb::make_tuple(vector_to_numpy(found), events);
  }

  // Annealing from each row of `starts`; `space` and `settings` are records of Python. A signal that
  // Python turns into an exception, as Ctrl-C, ends the chains; the last value tells.
  nb::tuple anneal(nb::object space, nb::object settings, In<i32> starts, In<i64> priorities,
                   In<u8> in_turn, In<i64> seeds, int threads) const {
    Space shared = space_of(space);
    const std::size_t K = seeds.size(), G = shared.num_groups, N = core_.num_tasks;
    if (starts.size() != K * G) throw nb::value_error("starts: wrong size");
    check_devices_of(starts);
    if (priorities.size()) check_priorities(priorities, K);
    if (in_turn.size() != K) throw nb::value_error("in_turn: wrong size");
    Settings common;
    common.temperature = nb::cast<double>(settings.attr("temperature"));
    common.critical_share = nb::cast<double>(settings.attr("critical_share"));
    common.moves = moves_of(settings.attr("moves"));
    common.most_evaluations = nb::cast<i64>(settings.attr("most_evaluations"));
    common.patience = nb::cast<i64>(settings.attr("patience"));
    common.least_ns = nb::cast<i64>(settings.attr("least_ns"));
    common.seconds = nb::cast<double>(settings.attr("seconds"));
    std::vector<Found> found(K);
    std::atomic<bool> stop{false};
    common.stop = &stop;
    bool interrupted = false;
    {
      nb::gil_scoped_release release;
      const auto poll = [&] {
        nb::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() == 0) return false;
        PyErr_Clear();
        return interrupted = true;
      };
      const int count = std::max(1, std::min<int>(threads, static_cast<int>(K)));
      common.seconds /= static_cast<double>((K + count - 1) / count);  // chains take turns
      std::atomic<std::size_t> next{0};
      run_threads(count, stop, poll, [&](int) {
        for (std::size_t k; (k = next++) < K;) {
          Settings own = common;
          own.seed = static_cast<std::uint64_t>(seeds.data()[k]);
          found[k] = Chain(shared, own)
                         .run(starts.data() + k * G, priorities.size() ? priorities.data() + k * N : nullptr,
                              in_turn.data()[k] != 0);
        }
      });
    }
    std::vector<i32> groups;
    std::vector<i64> waits, priority, step, overflow, evaluations;
    for (const Found& one : found) {
      groups.insert(groups.end(), one.groups.begin(), one.groups.end());
      priority.insert(priority.end(), one.priority.begin(), one.priority.end());
      waits.push_back(one.in_turn);
      step.push_back(one.step);
      overflow.push_back(one.overflow);
      evaluations.push_back(one.evaluations);
    }
    return nb::make_tuple(to_numpy(groups.data(), groups.size(), 1), vector_to_numpy(priority),
                          vector_to_numpy(waits), vector_to_numpy(step), vector_to_numpy(overflow), vector_to_numpy(evaluations),
                          interrupted);
  }

 private:
  void set_prices(const nb::object& transfers) {
    const auto transfer = copy<i64>(transfers, "transfer_ns"), channel = copy<i64>(transfers, "channel_ns");
    const auto send = copy<i64>(transfers, "send_ns"), receive = copy<i64>(transfers, "receive_ns");
    const auto queues = copy<u8>(transfers, "queues");
    for (std::size_t i = 0; i < transfer.size(); ++i)
      core_.prices.push_back({transfer[i], channel[i], send[i], receive[i], queues[i]});
  }
  static Moves moves_of(const nb::object& moves) {
    auto share = [&](const char* name) { return nb::cast<double>(moves.attr(name)); };
    return {share("swap_share"), share("run_share"), share("pair_share"), share("part_share"),
            share("beside_share"), share("fresh_share"), share("order_share")};
  }
  Space space_of(const nb::object& space) const {
    Space s;
    s.core = &core_;
    s.task_group = copy<i32>(space, "task_group");
    s.target = copy<i32>(space, "target");
    s.group_class = copy<i32>(space, "group_class");
    s.class_ptr = copy<i32>(space, "class_ptr");
    s.class_groups = copy<i32>(space, "class_groups");
    s.class_weight = copy<double>(space, "class_weight");
    s.devices = copy<i32>(space, "devices");
    s.limit_bytes = copy<i64>(space, "limit_bytes");
    s.pool_limit_bytes = copy<i64>(space, "pool_limit_bytes");
    s.tracks_memory = nb::cast<bool>(space.attr("tracks_memory"));
    s.num_groups = static_cast<i32>(s.group_class.size());
    s.num_classes = static_cast<i32>(s.class_weight.size());
    std::vector<std::vector<i32>> tasks(s.num_groups);
    for (i32 v = 0; v < core_.num_tasks; ++v) tasks[s.task_group[v]].push_back(v);
    s.group_ptr.push_back(0);
    for (const auto& row : tasks) {
      s.group_tasks.insert(s.group_tasks.end(), row.begin(), row.end());
      s.group_ptr.push_back(static_cast<i32>(s.group_tasks.size()));
    }
    return s;
  }
  void check_devices(const In<i32>& devices, std::size_t rows) const {
    if (devices.size() != rows * core_.num_tasks) throw nb::value_error("devices: wrong size");
    check_devices_of(devices);
  }
  void check_devices_of(const In<i32>& devices) const {
    for (std::size_t i = 0; i < devices.size(); ++i)
      if (devices.data()[i] < 0 || devices.data()[i] >= core_.num_devices)
        throw nb::value_error("devices: index out of range");
  }
  void check_priorities(const In<i64>& priorities, std::size_t rows) const {
    if (priorities.size() != rows * core_.num_tasks) throw nb::value_error("priorities: wrong size");
  }

  Core core_;
};

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Fast simulator, equal to devplace.simulator.reference.";
  nb::class_<Kernel>(m, "Kernel")
      .def(nb::init<nb::object, nb::object>(), nb::arg("tasks"), nb::arg("wires"))
      .def("priority", &Kernel::priority, nb::arg("device"))
      .def("trace", &Kernel::trace, nb::arg("device"), nb::arg("priority"), nb::arg("turn"))
      .def("evaluate", &Kernel::evaluate, nb::arg("devices"), nb::arg("priorities"),
           nb::arg("in_turn"), nb::arg("track_memory"), nb::arg("threads"))
      .def("moves", &Kernel::moves, nb::arg("device"), nb::arg("move_ptr"), nb::arg("move_task"),
           nb::arg("move_device"), nb::arg("cutoff"))
      .def("anneal", &Kernel::anneal, nb::arg("space"), nb::arg("settings"), nb::arg("starts"),
           nb::arg("priorities"), nb::arg("in_turn"), nb::arg("seeds"), nb::arg("threads"));
}

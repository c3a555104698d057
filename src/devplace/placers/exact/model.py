"""A step as a model for CP-SAT (OR-Tools, `devplace[exact]`).

Minimise `C` over placements `x[g, d]` of groups, begins `s[v]` of ops and `b[c, e]` of transfers,
with

- one device for each group: `sum_d x[g, d] = 1` (`_place`);
- every op on its device without overlap, as many at once as it has streams, followed by what its
  sends take of the device; `s[v] + time[v, d] <= C` (`_run`);
- a transfer `y[c, e]` of carrier `c` to every device `e` that reads it and does not make it, once:
  it begins after its maker, waits for its lane and channels, which serve in the order of requests,
  and its readers on `e` begin after it has arrived (`_send`);
- memory, where limits can bind: what each device and pool holds at any time stays within the limit,
  from the rules of the simulator (`_hold`).

Every schedule that the simulator can make is a solution of the model with the same or a smaller
`C`, so its bound holds for all placements, orders and priorities. The converse does not quite hold:
here a receive overhead delays only readers of what was received, sends of sources take nothing of
their devices, devices with several streams may wait, and bytes are rounded down to units where
limits are large. So solutions are simulated, and count as optimal only where the simulation meets
the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devplace.placers.exact.size import MAX_CONSTRAINTS, ModelSizeError, most_in_order
from devplace.problem import Problem
from devplace.problem.transfers import CHANNELS, NOTHING, Price

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Capacities are counted in units such that they stay below this.
MAX_UNITS = 2**24
MAX_OVER_VARIABLES = 2**61


@dataclass(frozen=True, eq=False)
class Space:
    """What the model may decide.

    Attributes:
        of_group: Class of each group: groups of a class go together. `[G]`
        allowed: Devices each class may go to. `[C, D]`
        horizon_ns: No op ends later.
        least_ns: A lower bound of the step time.
        with_memory: Whether limits can bind.
    """

    of_group: I32
    allowed: NDArray[np.bool_]
    horizon_ns: int
    least_ns: int
    with_memory: bool


class StepModel:
    """The model of one problem.

    Args:
        cp: The module `ortools.sat.python.cp_model`.
        problem: What is placed.
        space: What may be decided.
        is_late: Whether building must end.

    Raises:
        ModelSizeError: More than `MAX_CONSTRAINTS`, or it is late.
    """

    def __init__(
        self,
        cp: Any,
        problem: Problem,
        space: Space,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = cp.CpModel()
        self._is_late = is_late
        self.problem, self.space = problem, space
        self._tasks, self._wires = problem.core.tasks, problem.core.wires
        self._transfers = problem.core.transfers
        self._source = self._tasks.is_source.astype(bool).tolist()
        self._one = self.model.new_constant(1)
        self._both: dict[tuple[int, int], Any] = {}
        self._readers = [
            self._tasks.cons[a:b].tolist()
            for a, b in zip(self._tasks.cons_ptr[:-1], self._tasks.cons_ptr[1:], strict=True)
        ]
        self._maker = self._tasks.carrier_maker.tolist()
        self.step = self.model.new_int_var(space.least_ns, space.horizon_ns, "step")
        self.end_of_ops = self.step  # without the copies of the batch, which come first
        if self._transfers.copied:
            self.end_of_ops = self.model.new_int_var(0, space.horizon_ns, "end of ops")
        self._place()
        self._copy()
        self._times()
        self.sent: dict[tuple[int, int], tuple[Any, Any, Any]] = {}
        self._send()
        self._run()
        if space.with_memory:
            self._hold()
        self.model.minimize(self.step)

    @property
    def is_too_wide(self) -> bool:
        """Whether times are too long for CP-SAT, which adds up the ends of all its variables in 64
        bits."""
        ends: list[int] = [max(map(abs, v.domain)) for v in self.model.proto.variables]
        return sum(ends) >= MAX_OVER_VARIABLES

    def _check_size(self) -> None:
        if len(self.model.proto.constraints) > MAX_CONSTRAINTS:
            raise ModelSizeError(f"it has more than {MAX_CONSTRAINTS:,} constraints")
        if self._is_late():
            raise ModelSizeError("it takes too long to build")

    def on(self, task: int, device: int) -> Any:
        """Literal: the task runs on the device; None if it may not."""
        return self._on[int(self._of_task[task])].get(device)

    def choices(self, task: int) -> dict[int, Any]:
        """Literals of the devices that the task may run on."""
        return self._on[int(self._of_task[task])]

    def _place(self) -> None:
        self._of_task = self.problem.spaces.tasks_from_groups(self.space.of_group)
        self._on: list[dict[int, Any]] = []
        for c, row in enumerate(self.space.allowed):
            devices = np.flatnonzero(row).tolist()
            if len(devices) == 1:
                self._on.append({devices[0]: self._one})
                continue
            choice = {d: self.model.new_bool_var(f"x{c}_{d}") for d in devices}
            self.model.add_exactly_one(choice.values())
            self._on.append(choice)

    def _times(self) -> None:
        """Begins and ends; those of sources are 0."""
        model, horizon = self.model, self.space.horizon_ns
        self.begin: list[Any] = []
        self.end: list[Any] = []
        for v, is_source in enumerate(self._source):
            if is_source:
                self.begin.append(0)
                self.end.append(0)
                continue
            begin = model.new_int_var(0, horizon, f"s{v}")
            choice = self._on[int(self._of_task[v])]
            length = sum(x * int(self._wires.duration_ns[v, d]) for d, x in choice.items())
            self.begin.append(begin)
            end = model.new_int_var(0, horizon, f"f{v}")
            model.add(end == begin + length)
            model.add(end <= self.end_of_ops)
            self.end.append(end)
        for v in range(len(self._source)):
            for i in range(self._tasks.in_ptr[v], self._tasks.in_ptr[v + 1]):
                maker = self._maker[self._tasks.in_carrier[i]]
                if not self._source[maker]:
                    model.add(self.begin[v] >= self.end[maker])

    def _and(self, a: Any, b: Any) -> Any:
        """Literal: both hold."""
        if a is self._one or b is self._one or a is b:
            return b if a is self._one else a
        key = (a.index, b.index)
        if key not in self._both:
            both = self.model.new_bool_var("")
            self.model.add_implication(both, a)
            self.model.add_implication(both, b)
            self.model.add_bool_or([a.negated(), b.negated(), both])
            self._both[key] = both
        return self._both[key]

    def _send(self) -> None:
        self._lanes: dict[tuple[int, int, int], list[tuple[Any, ...]]] = {}
        self._channels: dict[int, list[tuple[Any, ...]]] = {}
        for carrier, readers in enumerate(self._readers):
            home = int(self._of_task[self._maker[carrier]])
            away = [r for r in readers if self._of_task[r] != home]
            for e in self.problem.usable_devices:
                here = [x for r in away if (x := self.on(r, e)) is not None]
                if here:
                    self._check_size()
                    self._send_to(carrier, e, away, here)
        queues = [*self._lanes.values(), *self._channels.values()]
        most = most_in_order([len(rows) for rows in queues])
        for rows in queues:
            self._check_size()
            self._keep_apart(rows, len(rows) <= most)

    def _send_to(self, carrier: int, e: int, away: list[int], here: list[Any]) -> None:
        """A transfer of the carrier to device e, if something there reads it and does not make
        it."""
        model, wires, maker = self.model, self._wires, self._maker[carrier]
        home = self._on[int(self._of_task[maker])]
        if home.keys() == {e}:
            return
        local = home.get(e)
        sent = model.new_bool_var(f"y{carrier}_{e}")
        for x in here:
            model.add_bool_or([x.negated(), sent, *([] if local is None else [local])])
        if local is not None:
            model.add_implication(sent, local.negated())
        model.add_bool_or([sent.negated(), *here])
        begin = model.new_int_var(0, self.space.horizon_ns, f"b{carrier}_{e}")
        arrival = model.new_int_var(0, self.space.horizon_ns, f"a{carrier}_{e}")
        model.add(begin >= self.end[maker]).only_enforce_if(sent)
        self.sent[carrier, e] = (sent, begin, arrival)
        for d, x in home.items():
            if d == e:
                continue
            price = self._transfers.price(carrier, d, e)
            used = self._and(sent, x)
            model.add(arrival >= begin + price.way_ns).only_enforce_if(used)
            pay = price.receive_ns if wires.streams[e] == 1 else 0
            for r in away:
                there = self.on(r, e)
                if there is not None:
                    model.add(self.begin[r] >= arrival + pay).only_enforce_if([used, there])
            self._wait(price, d, e, (used, begin, self.end[maker]), maker)

    def _wait(self, price: Price, d: int, e: int, row: tuple[Any, ...], maker: int) -> None:
        """The lane and the channels that the transfer occupies."""
        if price.queues == NOTHING:
            return
        lane = self._lanes.setdefault((d, e, price.queues), [])
        lane.append((*row, price.transfer_ns, maker))
        if price.queues == CHANNELS:
            for channel in self._transfers.channels(d, e):
                rows = self._channels.setdefault(channel, [])
                rows.append((*row, price.channel_ns, maker))

    def _keep_apart(self, rows: list[tuple[Any, ...]], in_order: bool) -> None:
        """One after the other, in the order of requests where that is wanted."""
        if len(rows) < 2:
            return
        model = self.model
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(begin, length, used, "")
            for used, begin, _, length, _ in rows
        )
        if not in_order:
            return
        for first, second in combinations(rows, 2):
            if first[4] == second[4]:
                continue  # sent at once, in the order of their readers
            first_goes = model.new_bool_var("")
            for earlier, later, goes in (
                (first, second, first_goes),
                (second, first, first_goes.negated()),
            ):
                both = [goes, earlier[0], later[0]]
                model.add(earlier[2] <= later[2]).only_enforce_if(both)
                model.add(later[1] >= earlier[1] + earlier[3]).only_enforce_if(both)

    def _run(self) -> None:
        model, wires = self.model, self._wires
        for d in self.problem.usable_devices:
            intervals, busy = [], []
            for v, is_source in enumerate(self._source):
                x = self.on(v, d)
                length = int(wires.duration_ns[v, d])
                if is_source or x is None:
                    continue
                if length:
                    busy.append(x * length)
                intervals.append(self._occupied(v, d, length, x))
            if wires.streams[d] == 1:
                model.add_no_overlap(intervals)
            else:
                model.add_cumulative(intervals, [1] * len(intervals), int(wires.streams[d]))
            model.add(sum(busy) <= int(wires.streams[d]) * self.end_of_ops)

    def _occupied(self, v: int, d: int, length: int, x: Any) -> Any:
        """The op, and on a device with one stream what its sends take of it afterwards."""
        model, wires, tasks = self.model, self._wires, self._tasks
        sends = []
        for carrier in range(tasks.out_ptr[v], tasks.out_ptr[v + 1]):
            for e in self.problem.usable_devices:
                pay = self._transfers.price(carrier, d, e).send_ns if e != d else 0
                if pay and (carrier, e) in self.sent:
                    sends.append(self.sent[carrier, e][0] * pay)
        if not sends or wires.streams[d] != 1:
            return model.new_optional_fixed_size_interval_var(self.begin[v], length, x, "")
        size = model.new_int_var(length, 2 * self.space.horizon_ns + length, "")
        model.add(size >= length + sum(sends)).only_enforce_if(x)
        after = model.new_int_var(0, 4 * self.space.horizon_ns, "")
        return model.new_optional_interval_var(self.begin[v], size, after, x, "")

    def _hold(self) -> None:
        """What devices and pools hold."""
        wires = self._wires
        held = {d: self._held_on(d) for d in self.problem.usable_devices}
        for d, rows in held.items():
            self._limit([rows], int(wires.limit_bytes[d]))
        for pool, limit in enumerate(wires.pool_limit_bytes.tolist()):
            self._limit([rows for d, rows in held.items() if wires.pool[d] == pool], limit)

    def _limit(self, devices: list[tuple[list[tuple[Any, ...]], list[Any]]], limit: int) -> None:
        """Intervals `(begin, end, literal, bytes)`, and `(literal, bytes)` held throughout."""
        unit = max(1, -(-limit // MAX_UNITS))
        capacity = limit // unit
        always = [(x, size // unit) for _, kept in devices for x, size in kept if size >= unit]
        rows = [row for found, _ in devices for row in found if row[3] >= unit]
        if not rows and not always:
            return
        model = self.model
        total = sum(size for _, size in always)
        base = model.new_int_var(0, min(total, capacity), "")
        model.add(base >= sum(x * size for x, size in always))
        intervals = [model.new_fixed_size_interval_var(0, self.space.horizon_ns + 1, "")]
        demands: list[Any] = [base]
        for begin, end, x, size in rows:
            length = model.new_int_var(0, self.space.horizon_ns, "")
            intervals.append(model.new_optional_interval_var(begin, length, end, x, ""))
            demands.append(size // unit)
            if size // unit > capacity:
                model.add_bool_or([x.negated()])
        model.add_cumulative(intervals, demands, capacity)

    def _held_on(self, d: int) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """What device d holds for a while, and what throughout."""
        tasks, wires, model = self._tasks, self._wires, self.model
        rows: list[tuple[Any, ...]] = []
        kept: list[Any] = []
        for v, is_source in enumerate(self._source):
            x = self.on(v, d)
            if x is None:
                continue
            self._check_size()
            if not is_source and tasks.workspace_bytes[v]:
                rows.append((self.begin[v], self.end[v], x, int(tasks.workspace_bytes[v])))
            for storage in range(tasks.storage_ptr[v], tasks.storage_ptr[v + 1]):
                over = bool(tasks.storage_over[storage] >= 0 and wires.fixed_buffers[d])
                begin = self.end[v] if over else self.begin[v]
                end = model.new_int_var(0, self.space.horizon_ns, "")
                model.add(end >= self.end[v])
                self._release(storage, v, d, end)
                rows.append((begin, end, x, int(tasks.storage_bytes[storage])))
        for (carrier, e), (sent, _, _) in self.sent.items():
            if e != d:
                continue
            size = int(tasks.carrier_bytes[carrier])
            if wires.fixed_buffers[d]:
                kept.append((sent, size))
                continue
            end = model.new_int_var(0, self.space.horizon_ns, "")
            model.add(end >= self.end[self._maker[carrier]])
            for r in self._readers[carrier]:
                there = self.on(r, d)
                if there is not None:
                    model.add(end >= self.end[r]).only_enforce_if([sent, there])
            rows.append((self.end[self._maker[carrier]], end, sent, size))
        kept += self._constants(d)
        return rows, kept

    def _release(self, storage: int, maker: int, d: int, end: Any) -> None:
        """The storage's end: after its readers here, and after what is sent of it has arrived."""
        tasks, model = self._tasks, self.model
        if tasks.storage_held[storage]:
            model.add(end >= self.end_of_ops)
        for carrier in range(tasks.out_ptr[maker], tasks.out_ptr[maker + 1]):
            if tasks.carrier_storage[carrier] != storage:
                continue
            for r in self._readers[carrier]:
                here = self.on(r, d)
                if here is not None:
                    model.add(end >= self.end[r]).only_enforce_if(here)
            for e in self.problem.usable_devices:
                if (carrier, e) in self.sent:
                    sent, _, arrival = self.sent[carrier, e]
                    model.add(end >= arrival).only_enforce_if(
                        self._and(sent, self.on(maker, d))
                        if self.on(maker, d) is not None
                        else sent
                    )

    def _copy(self) -> None:
        """The batch is copied to its devices before the first op begins."""
        terms = []
        for const, users in self.problem.core.copied():
            for d in self.problem.usable_devices:
                is_there = self._any(users.tolist(), d)
                if is_there is not None:
                    terms.append(int(self._transfers.copy_ns[const, d]) * is_there)
        if self.end_of_ops is not self.step:
            self.model.add(self.step >= self.end_of_ops + sum(terms))

    def _constants(self, d: int) -> list[Any]:
        """Read-only sources with a reader here, and what is held where any task runs."""
        tasks = self._tasks
        found = []
        for const, size in enumerate(tasks.const_bytes.tolist()):
            users = tasks.const_user[tasks.const_ptr[const] : tasks.const_ptr[const + 1]]
            found.append((self._any(users.tolist(), d), size))
        found.append((self._any(range(len(self._source)), d), int(self._wires.held_bytes[d])))
        return [(x, size) for x, size in found if x is not None and size]

    def _any(self, tasks: Any, d: int) -> Any:
        """Literal: one of the tasks is on the device; None if none may."""
        here = {x.index: x for v in tasks if (x := self.on(v, d)) is not None}
        if not here:
            return None
        if len(here) == 1:
            return next(iter(here.values()))
        used = self.model.new_bool_var("")
        for x in here.values():
            self.model.add_implication(x, used)
        return used

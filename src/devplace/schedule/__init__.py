"""What every device does in a step, made of placement and order: instructions, waits, writes.

Executors carry schedules out, and the simulator reads from them what a step keeps in memory.
"""

from devplace.schedule.linear import PushJoins, linear_order, meeting_order
from devplace.schedule.lowering import make_schedule
from devplace.schedule.order import order_fault, waiting_ops
from devplace.schedule.schedule import (
    Instruction,
    InstructionKind,
    PlannedTransfer,
    Schedule,
    last_uses,
    source_bytes,
    stored_sources,
)
from devplace.schedule.write_back import DeviceWrites, write_backs

__all__ = [
    "DeviceWrites",
    "Instruction",
    "InstructionKind",
    "PlannedTransfer",
    "PushJoins",
    "Schedule",
    "last_uses",
    "linear_order",
    "make_schedule",
    "meeting_order",
    "order_fault",
    "source_bytes",
    "stored_sources",
    "waiting_ops",
    "write_backs",
]

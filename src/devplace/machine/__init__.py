"""Where things run: devices, links, presets, machine files and detection."""

from devplace.machine.machine import Device, Link, Machine, Pool

__all__ = ["Device", "Link", "Machine", "Pool"]

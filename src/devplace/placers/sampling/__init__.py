"""Placers that learn nothing, with the groups, devices and rules of those that learn."""

"""Placement problems that others published: their files, read as they are."""

from devplace.instances.read import Changes, change_all, load_instance, recognise
from devplace.instances.records import (
    About,
    DataflowInstance,
    Instance,
    LoadInstance,
    PipelineInstance,
    VariantInstance,
    fingerprint,
)

__all__ = [
    "About",
    "Changes",
    "DataflowInstance",
    "Instance",
    "LoadInstance",
    "PipelineInstance",
    "VariantInstance",
    "change_all",
    "fingerprint",
    "load_instance",
    "recognise",
]

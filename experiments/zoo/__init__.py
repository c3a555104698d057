"""Small models of many kinds to capture, by name; each gives a case in float64.

Models of other libraries are made from small configurations, without downloads; what is not
installed is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from zoo import by_hand, checkpointed, hugging, pairs, techniques, vision
from zoo.case import Case

Make = Callable[[], Case]


def cases() -> dict[str, Make]:
    """Name (`library/model`) -> what makes the case."""
    written = by_hand.CASES | techniques.CASES
    found: dict[str, Make] = {f"hand/{name}": make for name, make in written.items()}
    found |= {f"checkpointed/{name}": make for name, make in checkpointed.CASES.items()}
    if find_spec("transformers"):
        from_transformers = hugging.cases() | pairs.cases()
        found |= {f"transformers/{name}": make for name, make in from_transformers.items()}
    if find_spec("torchvision"):
        found |= {f"torchvision/{name}": make for name, make in vision.torchvision_cases().items()}
    if find_spec("timm"):
        found |= {f"timm/{name}": make for name, make in vision.timm_cases().items()}
    return found

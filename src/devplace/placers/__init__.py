"""Who decides where ops go. A new placer is one file and one line in `PLAIN` or `LEARNING`.

A folder for each kind of placer; beside them what all share. Imports between the folders go one
way (pyproject.toml). Those that learn are in `devplace.research`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from devplace.placers.budget import Budget
from devplace.placers.counted_simulator import Evaluator, Score
from devplace.placers.exact.exact import Exact
from devplace.placers.list_schedulers.etf import Etf
from devplace.placers.list_schedulers.heft import Heft
from devplace.placers.list_schedulers.m_etf import MEtf
from devplace.placers.list_schedulers.m_sct import MSct
from devplace.placers.list_schedulers.m_topo import MTopo
from devplace.placers.list_schedulers.mayer import Mayer
from devplace.placers.local_search.search import Search
from devplace.placers.objective import Objective
from devplace.placers.partitioners.contiguous import Contiguous
from devplace.placers.partitioners.mincut import MinCut, MinCutRepaired
from devplace.placers.partitioners.pipedream import PipeDream
from devplace.placers.partitioners.scotch import Scotch, ScotchRepaired
from devplace.placers.place import OBJECTIVES, place
from devplace.placers.placer import Placer
from devplace.placers.ray_workers import RayWorkers
from devplace.placers.result import Result
from devplace.placers.simple.data_parallel import DataParallel
from devplace.placers.simple.even import Even, Topo
from devplace.placers.simple.expert import Expert
from devplace.placers.simple.greedy import Greedy
from devplace.placers.simple.layers import Layers
from devplace.placers.simple.single import Cpu, Single
from devplace.research.climb import Climb
from devplace.research.random import Random

if TYPE_CHECKING:
    from devplace.research.colocrl import ColocRl
    from devplace.research.encoder_placer import EncoderPlacer
    from devplace.research.grouper_placer import GrouperPlacer
    from devplace.research.hdp import Hdp, HdpNoGrouping, HdpRandomGrouping
    from devplace.research.mars import Mars, MarsNoPretraining
    from devplace.research.options import TrainingOptions
    from devplace.research.placeto import Placeto
    from devplace.research.post import Post, PostCe, PostPg, PostPpo
    from devplace.research.spotlight import Spotlight

    ALL: tuple[type[Placer], ...]

PLAIN: tuple[type[Placer], ...] = (
    Single,
    Cpu,
    Even,
    Layers,
    Expert,
    DataParallel,
    Greedy,
    Topo,
    Heft,
    Etf,
    MTopo,
    MEtf,
    MSct,
    Mayer,
    PipeDream,
    Scotch,
    ScotchRepaired,
    MinCut,
    MinCutRepaired,
    Random,
    Climb,
    Search,
    Exact,
)
"""Placers that do not learn; they need no torch."""
ONLY_THROUGHPUT: tuple[type[Placer], ...] = (Contiguous,)
"""Placers that make sense for the objective `throughput` only; `by_name` knows them too."""

# Name -> module in `research` and class of the placers that learn; loaded when first used.
LEARNING = {
    "colocrl": ("colocrl", "ColocRl"),
    "hdp": ("hdp", "Hdp"),
    "hdp-no-grouping": ("hdp", "HdpNoGrouping"),
    "hdp-random-grouping": ("hdp", "HdpRandomGrouping"),
    "spotlight": ("spotlight", "Spotlight"),
    "post": ("post", "Post"),
    "post-ce": ("post", "PostCe"),
    "post-ppo": ("post", "PostPpo"),
    "post-pg": ("post", "PostPg"),
    "placeto": ("placeto", "Placeto"),
    "mars": ("mars", "Mars"),
    "mars-no-pretraining": ("mars", "MarsNoPretraining"),
    "grouper-placer": ("grouper_placer", "GrouperPlacer"),
    "encoder-placer": ("encoder_placer", "EncoderPlacer"),
}

__all__ = [
    "ALL",
    "LEARNING",
    "OBJECTIVES",
    "ONLY_THROUGHPUT",
    "PLAIN",
    "Budget",
    "Climb",
    "ColocRl",
    "Contiguous",
    "Cpu",
    "DataParallel",
    "EncoderPlacer",
    "Etf",
    "Evaluator",
    "Even",
    "Exact",
    "Expert",
    "Greedy",
    "GrouperPlacer",
    "Hdp",
    "HdpNoGrouping",
    "HdpRandomGrouping",
    "Heft",
    "Layers",
    "MEtf",
    "MSct",
    "MTopo",
    "Mars",
    "MarsNoPretraining",
    "Mayer",
    "MinCut",
    "MinCutRepaired",
    "Objective",
    "PipeDream",
    "Placer",
    "Placeto",
    "Post",
    "PostCe",
    "PostPg",
    "PostPpo",
    "Random",
    "RayWorkers",
    "Result",
    "Score",
    "Scotch",
    "ScotchRepaired",
    "Search",
    "Single",
    "Spotlight",
    "Topo",
    "TrainingOptions",
    "by_name",
    "place",
]


def by_name(name: str) -> Placer:
    """The placer of this name, with its default hyper-parameters.

    Raises:
        InputError: No such placer; says which there are.
    """
    from devplace.errors import InputError, did_you_mean

    known = {placer().name: placer for placer in (*PLAIN, *ONLY_THROUGHPUT)}
    if name in LEARNING:
        return _learning(name)()
    if name not in known:
        names = [*known, *LEARNING]
        raise InputError(
            f"Unknown placer {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."
        )
    return known[name]()


def _learning(name: str) -> type[Placer]:
    """The class of a placer that learns; loads torch."""
    module, cls = LEARNING[name]
    found: type[Placer] = getattr(import_module(f"devplace.research.{module}"), cls)
    return found


if not TYPE_CHECKING:  # a misspelt name is an error to type checkers

    def __getattr__(name: str) -> Any:
        if name == "ALL":
            return (*PLAIN, *(_learning(learning) for learning in LEARNING))
        if name == "TrainingOptions":
            return import_module("devplace.research.options").TrainingOptions
        for learning, (_, cls) in LEARNING.items():
            if name == cls:
                return _learning(learning)
        raise AttributeError(f"module 'devplace.placers' has no attribute {name!r}")

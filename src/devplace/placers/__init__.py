"""Who decides where ops go. A new placer is one file and one line in `ALL`."""

from devplace.placers.budget import Budget
from devplace.placers.contiguous import Contiguous
from devplace.placers.data_parallel import DataParallel
from devplace.placers.etf import Etf
from devplace.placers.evaluate import Evaluator, Score
from devplace.placers.even import Even, Topo
from devplace.placers.exact import Exact
from devplace.placers.expert import Expert
from devplace.placers.greedy import Greedy
from devplace.placers.heft import Heft
from devplace.placers.layers import Layers
from devplace.placers.m_etf import MEtf
from devplace.placers.m_sct import MSct
from devplace.placers.m_topo import MTopo
from devplace.placers.mayer import Mayer
from devplace.placers.mincut import MinCut, MinCutRepaired
from devplace.placers.pipedream import PipeDream
from devplace.placers.place import OBJECTIVES, Result, place
from devplace.placers.placer import Placer
from devplace.placers.random import Random
from devplace.placers.scotch import Scotch, ScotchRepaired
from devplace.placers.search import Search
from devplace.placers.single import Cpu, Single
from devplace.placers.throughput import ThroughputResult

ALL: tuple[type[Placer], ...] = (
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
    Search,
    Exact,
)
ONLY_THROUGHPUT: tuple[type[Placer], ...] = (Contiguous,)
"""Placers that make sense for the objective `throughput` only; `by_name` knows them too."""

__all__ = [
    "ALL",
    "OBJECTIVES",
    "ONLY_THROUGHPUT",
    "Budget",
    "Contiguous",
    "Cpu",
    "DataParallel",
    "Etf",
    "Evaluator",
    "Even",
    "Exact",
    "Expert",
    "Greedy",
    "Heft",
    "Layers",
    "MEtf",
    "MSct",
    "MTopo",
    "Mayer",
    "MinCut",
    "MinCutRepaired",
    "PipeDream",
    "Placer",
    "Random",
    "Result",
    "Score",
    "Scotch",
    "ScotchRepaired",
    "Search",
    "Single",
    "ThroughputResult",
    "Topo",
    "by_name",
    "place",
]


def by_name(name: str) -> Placer:
    """The placer of this name, with its default hyper-parameters.

    Raises:
        InputError: No such placer; says which there are.
    """
    from devplace.errors import InputError, did_you_mean

    known = {placer().name: placer for placer in (*ALL, *ONLY_THROUGHPUT)}
    if name not in known:
        raise InputError(
            f"Unknown placer {name!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
        )
    return known[name]()

"""Chaos: break processes, servers, networks and clocks on purpose, then check every promise.

`python -m chaos` does it to Holdfast itself (`make chaos`). It needs a clone of the repository: it
is not in the wheel. The parts are a library that can break your own app in the same way:

* `ChaosPlan` deals faults from a seed: data, the same for the same seed,
* `Nemesis` inflicts them on targets: `Member` for a local process, or anything with two methods,
* `History` and `Effects` write down what was asked and what happened,
* `Checker` compares the two.

docs/chaos.md shows how they fit together.
"""

from chaos.checker import Checker, Verdict, Violation
from chaos.effects import Effects, Line
from chaos.fleet import Exit, Member, find_faketime
from chaos.history import History, Operation
from chaos.links import Link, Network
from chaos.nemesis import Nemesis, Target, Wound, victims
from chaos.plan import KINDS, ChaosPlan, Fault, Victim
from chaos.servers import ClusterTarget, NodeTarget, RoutedCluster

__all__ = [
    "KINDS",
    "ChaosPlan",
    "Checker",
    "ClusterTarget",
    "Effects",
    "Exit",
    "Fault",
    "History",
    "Line",
    "Link",
    "Member",
    "Nemesis",
    "Network",
    "NodeTarget",
    "Operation",
    "RoutedCluster",
    "Target",
    "Verdict",
    "Victim",
    "Violation",
    "Wound",
    "find_faketime",
    "victims",
]

"""Chaos: break processes, servers, networks and clocks on purpose, then check every promise.

`python -m holdfast.testing.chaos` does it to Holdfast itself (`make chaos`). The parts are a
library, to do the same to an app of one's own:

* `ChaosPlan` deals faults from a seed: data, the same for the same seed,
* `Nemesis` inflicts them on targets: `Member` for a local process, or anything with two methods,
* `History` and `Effects` write down what was asked and what happened,
* `Checker` compares the two.

docs/chaos.md shows how they fit together.
"""

from holdfast.testing.chaos.checker import Checker, Verdict, Violation
from holdfast.testing.chaos.effects import Effects, Line
from holdfast.testing.chaos.fleet import Exit, Member, find_faketime
from holdfast.testing.chaos.history import History, Operation
from holdfast.testing.chaos.links import Link, Network
from holdfast.testing.chaos.nemesis import Nemesis, Target, Wound, victims
from holdfast.testing.chaos.plan import KINDS, ChaosPlan, Fault, Victim
from holdfast.testing.chaos.servers import ClusterTarget, NodeTarget, RoutedCluster

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

"""Suspicion: when the absence of a node is proof enough, and when it is not.

A coordinator pings each node. A ping that nobody received, or that is not answered soon, makes the
node a *suspect*; it is then pinged more often, and its server is asked about its connection. Two
statements are *proof*: "nobody listens on its subject", and its server's statement that its
connection is gone. The second one works even while somebody listens to every subject.

    suspect ──► proof after proof for `confirm_seconds` ─────────► gone
            ──► a sign of life, or its connection stands ────────► not suspect

A node that was slow to answer before gets more time, because its machine is busy.

Beside this quick way there is a slow one, for a node whose server does not say which connections it
has (an older login, a leaf node): more than `ping_misses` rounds of pings in a row, each with
proof.

*Not* proof are a ping without an answer, since the process may be busy, and a server that falls
silent, since its clients are reconnecting to another. In both cases only the timeout counts.

`Hold` suspends both while there is proof against more than a few nodes at the same time: then a
server or a network was lost, and all nodes reconnect at once, which takes an unknown time. Until
most are back, only the timeout counts.

No clock and no I/O here: instants are given, on the monotonic clock of one process.
"""

from __future__ import annotations

from typing import Final

from holdfast.model.liveness import Liveness

PROOFS: Final = 2
"""One proof may have been on its way while the node came back."""
LOOKS: Final = 3
"""Checks of a suspect within `confirm_seconds`: two give the proofs, one may be late."""
ANSWER: Final = 0.5
"""The part of the ping interval within which a node must answer; after that it is a suspect."""
FRESH: Final = 1.2
"""A server's statement counts for this part of `confirm_seconds`: until the check after next."""
SLOW: Final = 6.0
"""Round trips of a node that reconnects (connecting, a handshake, its login, its subscriptions),
each of which takes about as long as its answers took before. Without this allowance, single nodes
whose connection was dropped were declared lost on a machine with a load of 28 on two cores."""
SLOW_FADES: Final = 0.9
"""The slowest answer decays by this factor with each later one: to half after three seconds in
`lan`."""
OUTLIVED: Final = 0.5
"""The fraction of `confirm_seconds` by which another node must outlive a suspect: small enough that
its answer has arrived when the suspect's time is over, so that no verdict has to wait for it."""
HOLD_NODES: Final = 3
HOLD_SHARE: Final = 0.05
"""Proof against more nodes than both of these is a disturbance: without this, dropping 200
connections at once cost 238 live nodes in 18 tries."""
HOLD_WINDOW_SECONDS: Final = 1.0
"""Proofs within this time count as one disturbance; each suspect is checked several times in it."""
HOLD_SECONDS: Final = 3.0
"""How long the hold continues for the last ones to come back. It must not end while most are still
missing: with eight times more work than cores, 148 of 160 live nodes were then lost at once."""

_NEVER: Final = float("-inf")


class Suspicion:
    """The evidence that one node is gone."""

    __slots__ = ("absent", "asked", "missed", "misses", "proofs", "since", "slowness")

    def __init__(self) -> None:
        self.since: float | None = None
        """Since when the node is a suspect."""
        self.proofs = 0
        self.misses = 0
        """Rounds of pings in a row that brought proof."""
        self.missed = False
        """Whether this round brought proof."""
        self.asked: float | None = None
        """When the oldest ping without an answer was sent."""
        self.absent = _NEVER
        """When its own server last said that its connection is gone."""
        self.slowness = 0.0
        """How long its answers took lately."""

    @property
    def suspect(self) -> bool:
        return self.since is not None

    # ---- what is heard

    def alive(self) -> None:
        """A sign of life."""
        self.forget()
        self.misses, self.missed, self.absent = 0, False, _NEVER

    def forget(self) -> None:
        """Restart the quick way: this coordinator was late and may have missed answers."""
        self.since, self.proofs, self.asked = None, 0, None

    def took(self, seconds: float) -> None:
        """A ping was answered after this time."""
        self.slowness = max(seconds, SLOW_FADES * self.slowness)

    def next_round(self, now: float) -> None:
        """A ping of the regular rounds is sent."""
        self.missed = False
        self.ping(now)

    def ping(self, now: float) -> None:
        """A ping is sent."""
        if self.asked is None:
            self.asked = now

    def overdue(self, now: float, liveness: Liveness) -> bool:
        """Whether a ping waits for its answer for too long."""
        return self.asked is not None and now - self.asked > ANSWER * liveness.ping_seconds

    def doubt(self, now: float) -> None:
        """Make it a suspect."""
        if self.since is None:
            self.since = now

    def nobody(self, now: float) -> None:
        """Nobody took the ping."""
        self.doubt(now)
        self._proof()

    def connection(self, now: float, *, open: bool) -> None:
        """The node's own server said whether its connection is open."""
        if open:  # no sign of life, and no death either: only the timeout is left
            self.alive()
        else:
            self.absent = now
            self.doubt(now)
            self._proof()

    def _proof(self) -> None:
        self.proofs += 1
        if not self.missed:
            self.missed = True
            self.misses += 1

    # ---- what follows

    def confirmed(self, now: float, liveness: Liveness) -> bool:
        """Gone by the quick way."""
        confirm = liveness.confirm_seconds
        return (
            self.since is not None
            and now - self.since >= confirm + SLOW * self.slowness
            and self.proofs >= PROOFS
            and now - self.absent <= FRESH * confirm
        )

    def outlived_by(self, proved: float, dropped: float, heard: float, liveness: Liveness) -> bool:
        """Whether another node kept its connection while this one, last heard at `heard`, did not.

        The other one answered a ping sent at `proved`, and was last without its connection at
        `dropped`. Nodes behind one proxy lose theirs a moment apart and come back one by one.
        """
        return (
            self.since is not None
            and dropped < heard - HOLD_WINDOW_SECONDS
            and proved >= self.since + OUTLIVED * liveness.confirm_seconds
        )

    def missing(self, liveness: Liveness, *, askable: bool) -> bool:
        """Gone by the slow way, where its server does not say which connections it has."""
        return not askable and self.misses > liveness.ping_misses


class Hold:
    """Suspends verdicts while there is proof against many nodes."""

    def __init__(self) -> None:
        self._accused: dict[str, float] = {}
        self._until = _NEVER

    def accused(self, node: str, now: float, nodes: int, lasting: float) -> bool:
        """Note proof against a node, valid for `lasting`; True when verdicts are now suspended."""
        self._accused[node] = now + max(lasting, HOLD_WINDOW_SECONDS)
        if len(self._accused) <= max(HOLD_NODES, HOLD_SHARE * nodes):
            return False
        self._accused = {n: until for n, until in self._accused.items() if until > now}
        if len(self._accused) <= max(HOLD_NODES, HOLD_SHARE * nodes):
            return False
        was_open = self.open(now)
        self._until = now + HOLD_SECONDS
        return was_open

    def cleared(self, node: str) -> None:
        """Forget a node: it was judged, or has ended."""
        self._accused.pop(node, None)

    def open(self, now: float) -> bool:
        """Whether absence alone may be judged."""
        return now >= self._until

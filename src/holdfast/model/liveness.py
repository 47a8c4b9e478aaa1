"""Liveness: how fast a node's death is noticed, and what is tolerated before that.

Each node carries its own values, in every heartbeat, and is judged by them. Three profiles, because
the right numbers depend on the network and not on the job:

    profile  heartbeat  timeout  initial delay  ping   confirm  misses  grace   a crash is seen in
    local       1 s        4 s        1 s       0.2 s   0.25 s    2       5 s   0.3 – 0.5 s
    lan         2.5 s     10 s        2 s       0.4 s   0.25 s    3      10 s   0.3 – 0.7 s
    wan         3 s       45 s       45 s       5 s     5 s       3     300 s   5 – 10 s

`heartbeat`: how often the node writes its record; 200 nodes at 2.5 s are 80 writes a second.
`timeout`: silence after which it is declared lost even if its connection still stands (a frozen
process, a cut network without a reset); four heartbeats, so that a stream's election (4–8 s) kills
nobody. `initial delay`: how long a new node is not judged at all. `ping`: how often a coordinator
asks the node's own subject, which answers "no responders" at once after a crash. `confirm`: how
long proof of a node's absence must last before it counts; a dropped connection is restored sooner.
`misses`: how many rounds of pings with such a proof are tolerated if the server cannot be asked
which connections it has; three at 0.4 s outlast a reconnect of a second. `grace`: how long a node
may finish its runs after SIGTERM, and how long `after_grace` waits before it restarts a lost node's
runs. `wan` has Kestra's numbers.
"""

from __future__ import annotations

from typing import Final

import msgspec

from holdfast.config import LivenessConfig
from holdfast.durations import text
from holdfast.errors import ConfigError
from holdfast.model.codec import Count, Seconds

LEAST_CONFIRM_SECONDS: Final = 0.1
"""The least `confirm`: a reconnect on one machine takes about 20 ms, and two checks have to fit in
as well."""


class Liveness(msgspec.Struct, frozen=True, omit_defaults=False):
    """The values by which one node is judged."""

    enabled: bool = True
    heartbeat_seconds: Seconds = 2.5
    timeout_seconds: Seconds = 10.0
    initial_delay_seconds: Seconds = 2.0
    ping_seconds: Seconds = 0.4
    ping_misses: Count = 3
    grace_seconds: Seconds = 10.0
    confirm_seconds: Seconds = 0.25
    cut_off: str = "stop"
    """What a worker does when it cannot reach NATS for its timeout: `stop` or `wait`."""

    def check(self) -> Liveness:
        """Refuse values that cannot work; each node checks only its own."""
        if self.timeout_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"timeout ({text(self.timeout_seconds)}) must be at least twice the heartbeat "
                f"({text(self.heartbeat_seconds)}): otherwise one late heartbeat counts as a death"
            )
        if self.timeout_seconds < 2:
            raise ConfigError("timeout must be at least 2 s: the server's own expiry needs 1 s")
        if self.heartbeat_seconds <= 0 or self.ping_seconds <= 0:
            raise ConfigError("heartbeat and ping intervals must be more than 0")
        if not LEAST_CONFIRM_SECONDS <= self.confirm_seconds <= self.timeout_seconds:
            raise ConfigError(
                f"confirm ({text(self.confirm_seconds)}) must be between "
                f"{text(LEAST_CONFIRM_SECONDS)} and the timeout ({text(self.timeout_seconds)}): a "
                "dropped connection needs a moment to come back"
            )
        if self.ping_misses < 0 or self.initial_delay_seconds < 0 or self.grace_seconds < 0:
            raise ConfigError("ping misses, initial delay and grace cannot be negative")
        if self.ping_seconds * self.ping_misses > self.timeout_seconds:
            raise ConfigError(
                f"{self.ping_misses} misses at {text(self.ping_seconds)} take longer than the "
                f"timeout ({text(self.timeout_seconds)}): the ping could never notice anything"
            )
        return self

    def describe(self) -> str:
        """The numbers in one line."""
        if not self.enabled:
            return "not judged (liveness disabled)"
        return (
            f"heartbeat {text(self.heartbeat_seconds)}, timeout {text(self.timeout_seconds)}, "
            f"initial delay {text(self.initial_delay_seconds)}, ping {text(self.ping_seconds)} × "
            f"{self.ping_misses} misses, confirmed in {text(self.confirm_seconds)}, "
            f"grace {text(self.grace_seconds)}"
        )


PROFILES: Final[dict[str, Liveness]] = {
    "local": Liveness(
        heartbeat_seconds=1.0,
        timeout_seconds=4.0,
        initial_delay_seconds=1.0,
        ping_seconds=0.2,
        ping_misses=2,
        grace_seconds=5.0,
    ),
    "lan": Liveness(),
    "wan": Liveness(
        heartbeat_seconds=3.0,
        timeout_seconds=45.0,
        initial_delay_seconds=45.0,
        ping_seconds=5.0,
        ping_misses=3,
        grace_seconds=300.0,
        confirm_seconds=5.0,
    ),
}
DEFAULT_PROFILE: Final = "lan"


def from_config(config: LivenessConfig, grace_seconds: float = 0.0) -> Liveness:
    """A node's values: those of its profile, unless configured."""
    profile = PROFILES[config.profile]
    given = {
        name: getattr(config, name)
        for name in (
            "heartbeat_seconds",
            "timeout_seconds",
            "initial_delay_seconds",
            "ping_seconds",
            "ping_misses",
            "grace_seconds",
            "confirm_seconds",
        )
        if getattr(config, name)
    }
    if grace_seconds:
        given["grace_seconds"] = grace_seconds
    return msgspec.structs.replace(
        profile, enabled=config.enabled == "yes", cut_off=config.cut_off, **given
    ).check()

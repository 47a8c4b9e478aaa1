"""The roles of the fleet: dispatchers, and agents on hosts.

Guaranteed: a record that exists is usable. Not checked: whether files, hosts or ports exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import holdfast.config.roles  # noqa: F401 - the roles come first on the page
from holdfast import names
from holdfast.config.option import Role, checked_by, option
from holdfast.errors import ConfigError


@dataclass(frozen=True, repr=False)
class DispatcherConfig(Role):
    """What one `holdfast dispatcher` does."""

    table = "dispatcher"

    seed_file: str = option(
        "",
        "File with the account seed, as `holdfast auth init` made it: commands are signed with it. "
        "Without, commands are not signed, and agents with credentials refuse them.",
    )
    generation: int = option(
        1,
        "Generation of the account's keys with which commands are signed; agents need credentials "
        "of it. Their reports are taken from this one, the one before and the next.",
        least=1,
        most=2**31,
    )
    ack_seconds: float = option(
        5.0,
        "An agent that has not acknowledged a command for so long is sent it once more.",
        least=0.05,
        most=600,
    )
    grace_seconds: float = option(
        5.0,
        "An agent that is silent for so long after that counts as unreachable.",
        least=0.05,
        most=600,
    )
    kept_seconds: int = option(
        604_800, "How long the record of a fan-out run that has ended is kept.", least=60
    )
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")


@dataclass(frozen=True, repr=False)
class AgentConfig(Role):
    """What one `holdfast agent` does."""

    table = "agent"

    id: str = option(
        "", "The agent's id, one for each host; without, the name of the host with '-' for '.'."
    )
    data_dir: str = option(
        "",
        "Directory for what must outlive the process: the runs it has seen, facts that were set; "
        "without, `.holdfast/agents/<id>`.",
    )
    facts_file: str = option("", "File with facts of your own, JSON or YAML; read again by itself.")
    commands: str = option(
        "no",
        "Whether `cmd.run` may start programs on this host, as the agent's user.",
        choices=("yes", "no"),
    )
    queue_size: int = option(
        64,
        "Commands that change something wait here, one runs at a time; when it is full the agent "
        "is busy and says so.",
        least=1,
        most=10_000,
    )
    concurrency: int = option(
        32, "Commands that only read, run at the same time.", least=1, most=10_000
    )
    heartbeat_seconds: float = option(
        10.0, "How often the agent says that it is there.", least=0.1, most=3600
    )
    timeout_seconds: float = option(
        30.0, "Silence after which it counts as offline.", least=2, most=86_400
    )
    facts_seconds: float = option(
        300.0, "How often facts that change (memory, disk) are read again.", least=1, most=86_400
    )
    facts_file_seconds: float = option(
        30.0, "How often `facts_file` is looked at.", least=0.1, most=86_400
    )
    grace_seconds: float = option(
        5.0, "How long running commands may go on after SIGTERM.", least=0, most=3600
    )
    health_port: int = option(
        0, "Port that answers health and metrics requests; 0 means none.", least=0, most=65_535
    )
    health_host: str = option("0.0.0.0", "Address on which `health_port` listens.")

    def _check_relations(self) -> None:
        if self.id:
            checked_by(names.check_name, self.id, "agent id")
        if self.timeout_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"timeout_seconds ({self.timeout_seconds:g}) must be at least twice "
                f"heartbeat_seconds ({self.heartbeat_seconds:g}): else one late heartbeat is an "
                "absence"
            )

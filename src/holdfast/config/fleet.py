"""The roles of the fleet: dispatchers, and agents on hosts.

Guaranteed: construction validates everything. Not checked: whether files, hosts or ports exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast import names
from holdfast.config.option import checked_by, option
from holdfast.config.roles import Served
from holdfast.errors import ConfigError


@dataclass(frozen=True, repr=False)
class DispatcherConfig(Served):
    """What one `holdfast dispatcher` does."""

    table = "dispatcher"

    seed_file: str = option("")
    """File with the account seed from `holdfast auth init`; commands are signed with it. Without
    it, commands are unsigned and agents with credentials refuse them."""
    generation: int = option(1, least=1, most=2**31)
    """Key generation that signs commands; agents need its credentials. Reports are accepted from
    this generation, the previous and the next one."""
    ack_seconds: float = option(5.0, least=0.05, most=600)
    """How long to wait for an agent's acknowledgement before the command is sent once more."""
    grace_seconds: float = option(5.0, least=0.05, most=600)
    """How long to wait after the second command before the agent counts as unreachable."""
    kept_seconds: int = option(604_800, least=60)
    """How long the record of a finished fan-out run is kept."""


@dataclass(frozen=True, repr=False)
class AgentConfig(Served):
    """What one `holdfast agent` does."""

    table = "agent"

    id: str = option("")
    """The agent's id, unique per host; defaults to the host name with '-' for '.'."""
    data_dir: str = option("")
    """Directory for state that outlives the process: the runs it has seen, facts that were set.
    Defaults to `.holdfast/agents/<id>`."""
    facts_file: str = option("")
    """File with additional facts, JSON or YAML; read again when it changes."""
    commands: str = option("no", choices=("yes", "no"))
    """Whether `cmd.run` may start programs on this host, as the agent's user."""
    queue_size: int = option(64, least=1, most=10_000)
    """Queue length for commands that change something; they run one at a time. While the queue is
    full, the agent refuses commands as busy."""
    concurrency: int = option(32, least=1, most=10_000)
    """How many read-only commands run at the same time."""
    heartbeat_seconds: float = option(30.0, least=0.1, most=3600)
    """How often the agent sends a heartbeat. It is only displayed, so it can be rare: ten thousand
    agents would otherwise send more heartbeats than anything else."""
    timeout_seconds: float = option(90.0, least=2, most=86_400)
    """Silence after which it counts as offline."""
    facts_seconds: float = option(300.0, least=1, most=86_400)
    """How often facts that change (memory, disk) are read again."""
    facts_file_seconds: float = option(30.0, least=0.1, most=86_400)
    """How often `facts_file` is checked for changes."""
    grace_seconds: float = option(5.0, least=0, most=3600)
    """How long running commands may continue after SIGTERM."""
    reconnect_seconds: float = option(5.0, least=0.1, most=3600)
    """Agents that lose a server reconnect spread over this time, and over more after each failed
    try. Ten thousand agents then make at most 2,000 connections a second; raise it for more."""

    def _check_relations(self) -> None:
        if self.id:
            checked_by(names.check_name, self.id, "agent id")
        if self.timeout_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"timeout_seconds ({self.timeout_seconds:g}) must be at least twice "
                f"heartbeat_seconds ({self.heartbeat_seconds:g}): otherwise one late heartbeat "
                "counts as offline"
            )

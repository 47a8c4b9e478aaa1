"""`holdfast agent`: one agent on this host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from holdfast.cli.command import command
from holdfast.cli.options import connection_given, option
from holdfast.cli.processes import Made, role_command

if TYPE_CHECKING:
    from holdfast.config import AgentConfig, ConnectionConfig


@command("agent")
@role_command
def agent(
    served: dict[str, Any],
    id: Annotated[str | None, option("The agent's id; defaults to the host's name.")] = None,
    data: Annotated[str | None, option("Directory for what must survive a restart.", "DIR")] = None,
    facts: Annotated[str | None, option("More facts, as JSON or YAML.", "FILE")] = None,
    app: Annotated[str, option("Offer the jobs of this app as well.", "APP")] = "",
    join: Annotated[
        str,
        option("Join with a token of 'holdfast auth token', or with the one in @FILE.", "TOKEN"),
    ] = "",
    allow_commands: Annotated[
        bool, option("Offer cmd.run, which runs any program as this user.")
    ] = False,
) -> Made:
    """Take commands for this host until SIGTERM or Ctrl-C, and report its facts.

    With credentials it obeys only commands that the dispatchers of its account have signed. A host
    that joins makes its own keys, and waits until it is accepted; later it needs no token. Exit
    codes: 0 after a signal, 1 when it cannot continue, 128 + signal after a second signal.
    """
    from holdfast.agent import Agent
    from holdfast.agent.facts import check_file
    from holdfast.cli.loading import load_app
    from holdfast.config import AgentConfig, ConnectionConfig, load
    from holdfast.identity.credentials import AgentCredentials

    config = load(
        AgentConfig,
        id=id,
        data_dir=data,
        facts_file=facts,
        commands="yes" if allow_commands else None,
        **served,
    )
    check_file(config.facts_file)
    connection = load(ConnectionConfig, **connection_given())
    if not connection.credentials_file:
        connection = _joined(config, connection, join)
    file = connection.credentials_file
    keys = AgentCredentials.load(file) if file else None
    loaded = load_app(app) if app else None
    return lambda: Agent(config, connection=connection, credentials=keys, app=loaded)


def _joined(config: AgentConfig, connection: ConnectionConfig, join: str) -> ConnectionConfig:
    """The connection, with the credentials that this host has from joining, earlier or now."""
    import asyncio
    import dataclasses

    from holdfast.agent import agent_id, joining, state_folder

    id = agent_id(config)
    folder = state_folder(config, id)
    file = folder / joining.FILE
    if join:
        text = Path(join[1:]).read_text(encoding="ascii") if join.startswith("@") else join
        asyncio.run(joining.join(text, id, folder, connection))
    if not file.exists():
        return connection
    known = joining.reaching(connection, folder)
    return dataclasses.replace(known, credentials_file=str(file))

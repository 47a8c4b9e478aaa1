"""Renders the server's configuration from a list of users.

The streams' account has the streams and no users except backups. Users are in four accounts without
streams, by trust: workers, control services and operators; clients; agents; hosts that have only a
token. They import the subjects of the streams that they need. A client may name any subject as the
reply of a request, and the server publishes its response there regardless of permissions, including
requests to the server itself. Across accounts a response stays in the requester's account: nothing
is stored there, nothing reaches the server, and no core process mistakes it for a change of a
bucket.

The exports to agents are their grants with `*` as id, so the two cannot drift apart; each user's
permissions say which agent may use which id.

Every user logs in with an nkey: the server holds only public keys, so no password can leak.
Strings are quoted as JSON, a subset of the server's format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.identity.credentials import AGENT, CORE_INBOX, inbox_of
from holdfast.identity.grants import ROLES, Grants, agent, program_bucket
from holdfast.names import Names

if TYPE_CHECKING:
    from holdfast.identity.users import NatsUser

RESPONSE_SECONDS: Final = 30  # how long a user may take to reply to a request
IN_STREAMS: Final = frozenset({"snapshot", "backup"})
"""Roles that log in to the streams' account: the server sends snapshots only there."""
IN_CLIENTS: Final = frozenset({"client"})
IN_JOINING: Final = frozenset({"join"})
_STREAMED: Final = {
    f"$JS.API.{verb}": ', response_type: "stream", threshold: "60s"'
    for verb in ("CONSUMER.MSG.NEXT.>", "DIRECT.GET.*")
}
"""Requests with many responses. The server keeps each for the threshold after its last response; a
pull gets a heartbeat every second, so a minute is plenty."""

_HEAD: Final = """\
# Written by 'holdfast auth', which overwrites changes made by hand. Check it with 'holdfast auth
# lint'; a running server takes it with 'nats-server --signal reload'.
"""

_EXAMPLE: Final = """\
# An example to start from, and yours from now on: 'holdfast auth' does not write it again.
server_name: {name}
listen: "127.0.0.1:4222"     # before others may reach it, switch on TLS below
http: "127.0.0.1:8222"       # the monitor has no login: keep it from others
max_payload: 1MB

jetstream {{
  store_dir: "data"
  sync_interval: always      # or an acknowledged write may be lost in a power cut
}}

# tls {{
#   cert_file: "server.pem"
#   key_file: "server.key"
#   ca_file: "ca.pem"        # with 'verify: true' clients need a certificate as well
#   handshake_first: true    # clients set tls_handshake = "first"
# }}

include ./auth.conf
"""


def render_server(names: Names) -> str:
    """An example of a complete configuration."""
    return _EXAMPLE.format(name=_text(names.namespace))


def streams_account(names: Names) -> str:
    """The account with the streams; only backups log in to it."""
    return names.namespace.upper()


def core_account(names: Names) -> str:
    """The account of workers, control services and operators; no streams."""
    return f"{streams_account(names)}_CORE"


def clients_account(names: Names) -> str:
    """The account of programs that only enqueue and wait; no streams."""
    return f"{streams_account(names)}_CLIENTS"


def agents_account(names: Names) -> str:
    """The account of agents; no streams."""
    return f"{streams_account(names)}_AGENTS"


def joining_account(names: Names) -> str:
    """The account of hosts that have only a token; no streams."""
    return f"{streams_account(names)}_JOINING"


def grants_of(names: Names, user: NatsUser) -> Grants:
    """A user's grants, including its private inbox."""
    if user.role == AGENT:
        found = agent(names, user.agent)
    else:
        found = ROLES[user.role](names)
        found.join(program_bucket(names, bucket, user.role) for bucket in user.buckets)
    return found.may_hear(f"{inbox_of(user.user, user.role)}.>")


def render_accounts(names: Names, users: Sequence[NatsUser]) -> str:
    """Accounts, users and permissions."""
    streams, core, clients, agents, joining = (_text(make(names)) for make in _accounts)
    services, changes = _services(names), [names.changed("*", ">")]
    shared = agent(names, "*")
    reports = [s for s in shared.publish if _is_stored(names, s)]
    answers = [*(s for s in shared.publish if s not in reports), f"{CORE_INBOX}.>"]
    notices = [s for s in shared.subscribe if s.startswith(f"{names.namespace}.kv.")]
    commands = [s for s in shared.subscribe if s not in notices]
    asked = [names.cancel("*")]
    exports = {
        streams: [
            *_exports("service", services, core, clients),
            *_exports("stream", changes, core, clients),
            *_exports("service", reports, agents),
            *_exports("stream", notices, agents),
        ],
        core: [
            *_exports("service", asked, clients),
            *_exports("service", answers, agents),
            *_exports("stream", commands, agents),
            *_exports("service", [names.join], joining),
        ],
    }
    stored = [*_imports("service", services, streams), *_imports("stream", changes, streams)]
    imports = {
        core: stored,
        clients: [*stored, *_imports("service", asked, core)],
        agents: [
            *_imports("service", reports, streams),
            *_imports("stream", notices, streams),
            *_imports("service", answers, core),
            *_imports("stream", commands, core),
        ],
        joining: _imports("service", [names.join], core),
    }
    lines = [_HEAD, "accounts {"]
    for account in (streams, core, clients, agents, joining):
        lines += [f"  {account}: {{", *(["    jetstream: enabled"] if account == streams else [])]
        own = [user for user in users if _text(account_of(names, user.role)) == account]
        lines += _block("users", (_user(names, user) for user in own))
        lines += _block("imports", imports.get(account, []))
        lines += [*_block("exports", exports.get(account, [])), "  }"]
    return "\n".join([*lines, "}", ""])


_accounts: Final = (
    streams_account,
    core_account,
    clients_account,
    agents_account,
    joining_account,
)


def account_of(names: Names, role: str) -> str:
    """The account that users of a role log in to."""
    if role == AGENT:
        return agents_account(names)
    if role in IN_STREAMS:
        return streams_account(names)
    if role in IN_JOINING:
        return joining_account(names)
    return clients_account(names) if role in IN_CLIENTS else core_account(names)


def _is_stored(names: Names, subject: str) -> bool:
    """Whether messages published there end up in a stream."""
    return subject.startswith("$") or subject == names.returned("*", "*")


def _services(names: Names) -> list[str]:
    """What the core requests from the streams' account. The subjects must not overlap, or a request
    would arrive twice."""
    ns = names.namespace
    verbs = ("CREATE", "DELETE", "INFO", "LIST", "NAMES", "PAUSE")
    return [
        "$JS.API.INFO",
        "$JS.API.STREAM.>",
        *(f"$JS.API.CONSUMER.{verb}.>" for verb in verbs),
        *_STREAMED,
        "$JS.API.DIRECT.GET.*.>",
        "$JS.ACK.>",
        "$KV.>",
        "$O.>",
        *(f"{ns}.{noun}.>" for noun in ("job", "later", "canary", "event", "dead", "log")),
        *(f"{ns}.{noun}.>" for noun in ("ended", "indexed", "runlog", "flow", "signal", "wait")),
        names.returned("*", "*"),
    ]


def _exports(kind: str, subjects: Iterable[str], *accounts: str) -> list[str]:
    to = ", ".join(accounts)
    return [f"{{{kind}: {_text(s)}{_STREAMED.get(s, '')}, accounts: [{to}]}}" for s in subjects]


def _imports(kind: str, subjects: Iterable[str], account: str) -> list[str]:
    return [f"{{{kind}: {{account: {account}, subject: {_text(s)}}}}}" for s in subjects]


def _block(name: str, entries: Iterable[str]) -> list[str]:
    return [f"    {name}: [", *(f"      {entry}" for entry in entries), "    ]"]


def _user(names: Names, user: NatsUser) -> str:
    grants = grants_of(names, user)
    responses = (
        f'\n        allow_responses: {{max: {grants.responses}, expires: "{RESPONSE_SECONDS}s"}}'
        if grants.responses
        else ""
    )
    return (
        f"{{nkey: {user.nkey}, permissions: {{  # {user.user}\n"
        f"        publish: {_list(grants.publish | grants.local)}\n"
        f"        subscribe: {_list(grants.subscribe)}{responses}\n"
        "      }}"
    )


def _list(subjects: Iterable[str]) -> str:
    return "[" + ", ".join(map(_text, subjects)) + "]"


def _text(text: str) -> str:
    return json.dumps(text)

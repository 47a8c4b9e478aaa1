"""The server's configuration, made from a list of users.

Two accounts: the core's, which has the streams, and the agents', which has none and imports the few
subjects that agents use. What the core exports to the agents is their own grants with `*` as id, so
the two cannot drift apart; which agent may use which id is said by each user's permissions.

Every user logs in with an nkey: the server holds public keys only, there is no password to leak.
Texts are quoted as JSON, which the server's format contains.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.identity.credentials import AGENT, CORE_INBOX, inbox_of
from holdfast.identity.grants import ROLES, Grants, agent, program_bucket
from holdfast.names import Names

if TYPE_CHECKING:
    from holdfast.identity.users import User

RESPONSE_SECONDS: Final = 30

_HEAD: Final = """\
# Made by 'holdfast auth'; changes made by hand are lost at the next one.
# Check it with 'holdfast auth lint'; a running server takes it with 'nats-server --signal reload'.
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
    """An example of a whole configuration."""
    return _EXAMPLE.format(name=_text(names.namespace))


def core_account(names: Names) -> str:
    """The account of the core, which has the streams."""
    return names.namespace.upper()


def agents_account(names: Names) -> str:
    """The account of the agents, which has none."""
    return f"{core_account(names)}_AGENTS"


def grants_of(names: Names, user: User) -> Grants:
    """What a user may do, its private inbox included."""
    if user.role == AGENT:
        found = agent(names, user.agent)
    else:
        found = ROLES[user.role](names)
        found.join(program_bucket(names, bucket) for bucket in user.buckets)
    return found.may_hear(f"{inbox_of(user.user, user.role)}.>")


def render_accounts(names: Names, users: Sequence[User]) -> str:
    """Accounts, users and permissions."""
    core, agents = _text(core_account(names)), _text(agents_account(names))
    shared = agent(names, "*")
    services = [*shared.publish, f"{CORE_INBOX}.>"]
    exports = [f"{{service: {_text(s)}, accounts: [{agents}]}}" for s in services]
    exports += [f"{{stream: {_text(s)}, accounts: [{agents}]}}" for s in shared.subscribe]
    imports = [f"{{service: {{account: {core}, subject: {_text(s)}}}}}" for s in services]
    imports += [f"{{stream: {{account: {core}, subject: {_text(s)}}}}}" for s in shared.subscribe]
    lines = [_HEAD, "accounts {", f"  {core}: {{", "    jetstream: enabled"]
    lines += _block("users", (_user(names, u) for u in users if u.role != AGENT))
    lines += [*_block("exports", exports), "  }", f"  {agents}: {{"]
    lines += _block("users", (_user(names, u) for u in users if u.role == AGENT))
    lines += [*_block("imports", imports), "  }", "}"]
    return "\n".join(lines) + "\n"


def _block(name: str, entries: Iterable[str]) -> list[str]:
    return [f"    {name}: [", *(f"      {entry}" for entry in entries), "    ]"]


def _user(names: Names, user: User) -> str:
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

"""Login by a proxy in front, which authenticates people, for example by OIDC, and names them in
headers.

Guaranteed: the headers count only on connections that a configured address made (`login_proxies`);
from anywhere else they are ignored. It is the address of the connection itself that counts, never
one that a header claims. A request that carries a header twice is refused, because a client may
have sent the first one. Users without a group that has a role get no access.

Not guaranteed: that the proxy removes these headers from the requests of clients. It must: see
docs/web.md. Programs keep using bearer tokens.
"""

from __future__ import annotations

import re
from typing import Final

from fastapi import Request

from holdfast.config import WebConfig
from holdfast.errors import ConfigError
from holdfast.web.auth import ROLES, Role, User
from holdfast.web.network import is_in
from holdfast.web.problems import Problem

ANYONE: Final = "*"
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.@+-]{0,127}")


class ProxyLogin:
    """Reads the user from a trusted proxy's headers."""

    def __init__(self, config: WebConfig) -> None:
        self._proxies = [one.strip() for one in config.login_proxies.split(",") if one.strip()]
        self._user = config.login_user_header
        self._groups = config.login_groups_header
        self._roles = _roles(config.login_roles)
        if self._proxies and not self._roles:
            raise ConfigError(
                "web.login_proxies is set, but web.login_roles gives nobody a role: write "
                "GROUP=ROLE, separated by commas, e.g. 'sre=admin,dev=operator,*=viewer'"
            )
        if ANYONE in self._proxies:
            raise ConfigError(
                "web.login_proxies must name addresses or networks: with '*' everybody could claim "
                "to be anyone"
            )

    def __bool__(self) -> bool:
        return bool(self._proxies)

    def find(self, request: Request) -> User | None:
        """The user that the proxy names; None if it is no trusted proxy, or names nobody."""
        if not self._proxies or not self._trusted(request):
            return None
        name = _single(request, self._user)
        if not name:
            return None
        if not _NAME.fullmatch(name):
            raise Problem(403, f"The proxy's {self._user} is not a usable name")
        groups = {one.strip() for one in _single(request, self._groups).split(",")}
        role = self._role(groups)
        if role is None:
            raise Problem(403, f"{name} is in no group that has a role here: ask the administrator")
        return User(name, role, "proxy")

    def _trusted(self, request: Request) -> bool:
        """Whether a configured address made the connection; `X-Forwarded-For` does not matter."""
        peer = getattr(request.state, "peer", "") or (request.client.host if request.client else "")
        return any(is_in(peer, one) for one in self._proxies)

    def _role(self, groups: set[str]) -> Role | None:
        mine = [role for group, role in self._roles.items() if group in (*groups, ANYONE)]
        return max(mine, key=ROLES.index, default=None)


def _single(request: Request, header: str) -> str:
    values = request.headers.getlist(header) if header else []
    if len(values) > 1:
        raise Problem(403, f"The header {header} came twice: the proxy must remove the client's")
    return values[0].strip() if values else ""


def _roles(text: str) -> dict[str, Role]:
    found: dict[str, Role] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        group, equals, role = (one.strip() for one in part.rpartition("="))
        known = [one for one in ROLES if one == role]
        if not equals or not group or not known:
            raise ConfigError(
                f"web.login_roles: {part!r:.80} must be GROUP=ROLE; roles are {', '.join(ROLES)}"
            )
        found[group] = known[0]
    return found

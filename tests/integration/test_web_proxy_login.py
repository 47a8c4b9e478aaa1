"""Login by a proxy in front: whom it may name, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import WebConfig
from holdfast.errors import ConfigError
from holdfast.server import Server
from holdfast.web.proxy_login import ProxyLogin
from tests.integration.test_web_process import address, web

PROXY, OTHER = "127.0.0.2", "127.0.0.1"
ENV = {
    "HOLDFAST_WEB_LOGIN_PROXIES": "10.1.0.0/16,127.0.0.2",
    "HOLDFAST_WEB_LOGIN_ROLES": "sre=admin,dev=operator",
    "HOLDFAST_WEB_PROXIES": "127.0.0.1,127.0.0.2",
}
SENT = {
    "X-Forwarded-For": "203.0.113.9",
    "X-Forwarded-Proto": "http",
    "X-Forwarded-User": "ann@example.com",
    "X-Forwarded-Email": "ann@example.com",
    "X-Forwarded-Preferred-Username": "ann",
    "X-Forwarded-Groups": "everybody,dev",
    "X-Forwarded-Access-Token": "eyJhbGciOi",
}
"""As oauth2-proxy sends them with --pass-user-headers."""


def client(url: str, source: str) -> httpx.AsyncClient:
    """Connects from one of the machine's own addresses."""
    transport = httpx.AsyncHTTPTransport(local_address=source)
    return httpx.AsyncClient(transport=transport, base_url=url)


async def test_only_a_named_proxy_says_who_is_asking(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """Its connection counts, whatever address its headers claim; groups decide the role."""
    with web(nats, namespace, tmp_path, **ENV) as process:
        url = await address(process)
        async with client(url, PROXY) as proxy, client(url, OTHER) as other:
            page = await proxy.get("/runs", headers=SENT | {"Accept": "text/html"})
            assert page.status_code == 200
            assert "ann@example.com <small>(operator)</small>" in page.text
            for claim in ({}, {"X-Forwarded-For": PROXY}, {"X-Forwarded-For": "10.1.0.5"}):
                assert (await other.get("/api/v1/runs", headers=SENT | claim)).status_code == 401
            assert (await proxy.get("/api/v1/runs")).status_code == 401, "nobody is named"


async def test_what_a_proxy_says_must_be_clear(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """A name twice, no name, no group with a role are refused; changes need a CSRF token."""
    with web(nats, namespace, tmp_path, **ENV) as process:
        url = await address(process)
        async with client(url, PROXY) as proxy:
            twice = [*SENT.items(), ("X-Forwarded-User", "root@example.com")]
            assert (await proxy.get("/api/v1/runs", headers=twice)).status_code == 403
            for name, groups in (("ann smith", "dev"), ("ann", "everybody"), ("ann", "")):
                headers = SENT | {"X-Forwarded-User": name, "X-Forwarded-Groups": groups}
                assert (await proxy.get("/api/v1/runs", headers=headers)).status_code == 403
            sent = await proxy.post("/api/v1/runs", headers=SENT, json={"job": "x"})
            assert sent.status_code == 403
            assert "CSRF" in sent.text
            drained = await proxy.post("/do/cluster/drain", headers=SENT, data={"node": "n"})
            assert drained.status_code == 403


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"login_proxies": "10.0.0.1"}, "gives nobody a role"),
        ({"login_proxies": "*", "login_roles": "a=admin"}, "everybody could claim"),
        ({"login_roles": "a=root"}, "roles are viewer, operator, admin"),
        ({"login_roles": "admin"}, "must be GROUP=ROLE"),
    ],
)
def test_login_by_proxy_is_checked_at_the_start(options: dict[str, Any], said: str) -> None:
    """A configuration that would let everybody in, or nobody, is refused."""
    with pytest.raises(ConfigError, match=said):
        ProxyLogin(WebConfig(**options))

"""The API under schemathesis: whatever fits its description, or does not, is never a 5xx."""

from __future__ import annotations

import os
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from holdfast.server import Server
from tests.integration.web_support import TOKENS, serving, shop

HEADERS = {"Authorization": f"Bearer {TOKENS['admin'][0]}"}
EXAMPLES = 200 if os.environ.get("HOLDFAST_SOAK") else 6
SPARED = ("/api/v1/runs/{run}/result",)
"""It waits for as long as it is told to."""


def test_api_answers_everything_without_a_server_error(nats: Server, namespace: str) -> None:
    """Each operation gets made-up requests, right and wrong; answers have the shapes told."""
    with serving(nats, namespace, shop()) as url, httpx.Client(headers=HEADERS) as client:
        _fill(client, f"{url}/api/v1")
        document = client.get(f"{url}/api/v1/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document)
        asked = 0
        for found in schema.get_all_operations():
            asked += _ask(found.ok(), url)
    assert asked >= 34 * EXAMPLES // 2


def _fill(client: httpx.Client, api: str) -> None:
    """Something to be found: a run, a schedule, what made-up names may hit."""
    client.post(f"{api}/runs", json={"job": "add", "payload": {"a": 1, "b": 2}, "key": "0"})
    client.post(f"{api}/schedules", json={"name": "0", "job": "add", "every": "1h"})


def _ask(operation: Any, url: str) -> int:
    """Send made-up requests to one operation; returns how many."""
    count = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=not os.environ.get("HOLDFAST_SOAK"),
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        nonlocal count
        count += 1
        if case.operation.path in SPARED and case.query:
            case.query.pop("wait", None)
        answer = case.call(base_url=url, headers=HEADERS)
        assert answer.status_code < 500, f"{case.method} {case.path}: {answer.text}"
        told = case.operation.definition.raw["responses"]
        assert str(answer.status_code) in told or answer.status_code == 405, answer.status_code

    given(operation.as_strategy())(check)()
    return count

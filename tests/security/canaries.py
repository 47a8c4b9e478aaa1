"""Canaries: secrets in every form in which people write them, in every place that a page can show.

`plant` fills a namespace as its workers, agents and clients would; no name here is the product's.
"""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec

from holdfast.client import Client
from holdfast.model import fleet, run
from holdfast.model.fleet import FleetRequest, FleetRun, Return
from holdfast.model.run import Attempt, Progress, RunRecord
from holdfast.model.runlog import LOG_MESSAGE, Logged, LogMessage
from holdfast.model.schedule import Schedule, encode
from holdfast.names import kv_subject
from holdfast.settings.records import Report
from holdfast.status.audit import Audit

CANARY = "canary7x"
"""Prefix of each secret; a number follows."""


class Secrets:
    """Makes secrets, and remembers them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def new(self) -> str:
        """A new, unique secret."""
        self.made.append(f"{CANARY}{len(self.made)}q")
        return self.made[-1]

    def text(self) -> str:
        """An error, a note or a line of a log with a secret in every form."""
        new = self.new
        return "\n".join(
            [
                f"connect failed: password={new()} host=db",
                f"mysql -h db --password {new()} --user ann",
                f"redis://:{new()}@cache:6379/0 and postgres://ann:{new()}/x@db/shop",
                f"Authorization: Basic {new()}",
                f"Cookie: a={new()}; b={new()}",
                f'{{"nested": {{"api_key": {{"deep": ["{new()}"]}}}}}}',
                f"PGPASSWORD={new()} pg_dump; dbPassword = '{new()} {new()}'",
                f"call(password=SecretStr('{new()}'), token=b'{new()} {new()}')",
                f"password 'x{new()}' was refused; curl -u ann:{new()} https://db",
                f"client_secret: |\n  {new()}\n  {new()}\nnext: 1",
                f"-----BEGIN PRIVATE KEY-----\n{new()}\n-----END PRIVATE KEY-----",
                f'body was {{\\"password\\": \\"{new()}\\"}}, {{"p\\u0061ssword": "{new()}"}}',
            ]
        )

    def value(self) -> dict[str, Any]:
        """A JSON value with a secret in every form."""
        new = self.new
        return {
            "user": "ann",
            "password": new(),
            "nested": [{"deep": {"apiKey": {"x": [new()]}}}],
            "command": ["mysql", "--password", new(), "-u", f"ann:{new()}"],
            "headers": [["Authorization", f"Bearer {new()}"], ["X", "1"]],
            "env": [{"name": "DB_PASSWORD", "value": new()}],
            "url": f"redis://:{new()}@cache",
            f"password={new()}": 1,
            "pem": f"-----BEGIN RSA PRIVATE KEY-----\n{new()}\n",
            "text": self.text(),
            "inner": json.dumps({"token": new(), "more": {"secret": [new()]}}),
        }

    def large(self) -> dict[str, Any]:
        """The same after, and around, more than a page shows."""
        filler = ["x" * 70] * 500
        return {"first": self.value(), "filler": filler, "last": {"deep": [self.value()]}}

    def headers(self) -> dict[str, str]:
        return {"X-Api-Key": self.new(), "Cookie": self.new(), "X-Note": f"token={self.new()}"}


async def plant(client: Client, secrets: Secrets) -> None:
    """Put secrets wherever records of this namespace can hold text."""
    await _runs(client, secrets)
    await _letters(client, secrets)
    await _schedules(client, secrets)
    await _fleet(client, secrets)
    for key in ("r1", "r5"):
        line = Logged(time.time(), secrets.text(), extra=secrets.value())
        body = LOG_MESSAGE.encode(LogMessage((line,), "add", 1, "w1"))
        await client.broker.store(client.broker.names.run_log(key), body)
    audit = Audit(client, "ann")
    await audit.write("enqueue", runs=["r1"], detail=f"password={secrets.new()}")


async def _put(client: Client, bucket: str, key: str, body: bytes) -> None:
    await client.broker.store(kv_subject(bucket, key), body)


async def _runs(client: Client, secrets: Secrets) -> None:
    now, names = time.time(), client.broker.names
    attempts = tuple(
        Attempt(n, "w1", n, now - 9, now - 8, "failed", error=secrets.text()) for n in (1, 2)
    )
    kept = {
        "r1": RunRecord("dead", "default", "add", error=secrets.text(), attempts=attempts),
        "r2": RunRecord("done", "default", "add", result=_raw(secrets.large())),
        "r3": RunRecord("done", "default", "new-token", result=_raw(secrets.new())),
        "r4": RunRecord(
            "running", "default", "add", progress=Progress(0.5, secrets.text(), now), node="w1"
        ),
        "r5": RunRecord(
            "running", "default", "broken", once=True, body=_json(secrets.new()), node="w1"
        ),
        "r6": RunRecord(
            "running", "default", "add", once=True, body=_json(secrets.large()), node="w1"
        ),
        "r7": RunRecord("done", "default", "add", result=_raw(_deep(600, secrets.value()))),
    }
    for key, record in kept.items():
        await _put(client, names.runs, key, run.encode(record))
    for n, body in enumerate(_payloads(secrets)):
        headers = {"Nats-Msg-Id": f"q{n}", "Hf-Run": f"q{n}", **secrets.headers()}
        await client.broker.store(names.job("default", "broken"), body, headers)


def _payloads(secrets: Secrets) -> list[bytes]:
    """Payloads of a job with one parameter: large, deep, truncated, and not UTF-8."""
    return [
        _json(secrets.new()),
        _json([secrets.new()]),
        _json(secrets.value()),
        _json(secrets.large()),
        _json(_deep(600, secrets.value())),
        b"[" * 3_000 + _json(secrets.value()) + b"]" * 3_000,
        b'{"a": ' * 3_000 + _json(secrets.value()) + b"}" * 3_000,
        _json(secrets.large())[:-10],
        b"\xff\xfe" + secrets.new().encode(),
        f"password is {secrets.new()}".encode(),
    ]


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(_json(value))


def _deep(levels: int, value: Any) -> Any:
    for _ in range(levels):
        value = {"a": value}
    return value


async def _letters(client: Client, secrets: Secrets) -> None:
    subject = client.broker.names.dead_letter("default", "broken")
    for n, body in enumerate(_payloads(secrets)):
        attempts = [Attempt(1, "w1", 1, 1.0, 2.0, "failed", error=secrets.text())]
        headers = {
            "Nats-Msg-Id": f"d{n}",
            "Hf-Run": f"d{n}",
            "Hf-Reason": "failed",
            "Hf-Error": json.dumps(secrets.text()),
            "Hf-Traceback": json.dumps(secrets.text()),
            "Hf-Attempts": msgspec.json.encode(attempts).decode(),
            **secrets.headers(),
        }
        await client.broker.store(subject, body, headers)


async def _schedules(client: Client, secrets: Secrets) -> None:
    bucket = client.broker.names.schedules
    bodies = [_json(secrets.large()), _json(secrets.new()), _json(_deep(600, secrets.value()))]
    for n, body in enumerate(bodies, 1):
        made = Schedule(
            f"s{n}",
            "broken",
            every=3600,
            payload=msgspec.Raw(body),
            headers=secrets.headers(),
            since=1.0,
        )
        await _put(client, bucket, f"schedule.s{n}", encode(made))


async def _fleet(client: Client, secrets: Secrets) -> None:
    names = client.broker.names
    for bucket in ("facts", "agents", "fleet", "returns", "applied", "settings"):
        await client.topology.ensure_buckets(bucket)
    facts = {"os": "linux", "note": secrets.text(), **secrets.value()}
    await _put(client, names.facts, "a1", msgspec.json.encode(facts))
    words = ("mysql", "--password", secrets.new(), f"--token={secrets.new()}")
    asked = {
        "f1": FleetRequest("f1", "*", "cmd.run", words, {"password": secrets.new()}, raw=True),
        "f2": FleetRequest("f2", "*", "set_password", (secrets.new(),)),
    }
    for key, request in asked.items():
        record = FleetRun(request, "partial", ("a1",), reason=secrets.text(), returned=1)
        await _put(client, names.fleet, f"run.{key}", fleet.encode(record))
        given = Return(key, "a1", "failed", secrets.large(), secrets.text(), note=secrets.text())
        body = msgspec.json.encode(given)
        await _put(client, names.returns, f"{key}.a1", body)
    failed = Report(1, 1, failed_number=2, reason=secrets.text(), error=secrets.text())
    await _put(client, names.applied, "a1", msgspec.json.encode(failed))

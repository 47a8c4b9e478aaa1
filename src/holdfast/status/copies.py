"""Ways to send a run again from elsewhere: a command, a Python program, a curl line.

Each sends a new run with the payload and the headers of the run. Its key is left out, because the
run would otherwise count as a repeat. Where the job computes its key, each replaces the run of that
key instead.

The texts hold the payload as it is, with its secrets: show them only to somebody who may send.
"""

from __future__ import annotations

import json
import pprint
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast.client import Client
from holdfast.errors import RunError
from holdfast.names import DEFAULT_GROUP
from holdfast.payload.published import Published
from holdfast.status.finding import Found, payload_of
from holdfast.status.jobs import Jobs

LONGEST_ARGUMENT: Final = 100_000
"""Bytes of a payload that go into a command line: Linux takes 128 KiB for one argument."""
LOCAL_URL: Final = "http://127.0.0.1:8080"
"""Where `holdfast web` and `holdfast dev` serve the API unless they are told otherwise."""


class Copies(msgspec.Struct, frozen=True):
    """A run in each form."""

    cli: str
    python: str
    curl: str
    payload: str


async def copies_of(client: Client, found: Found, url: str = LOCAL_URL) -> Copies:
    """A run in each form; `RunError` if its payload is not kept, or is not JSON."""
    kept = await payload_of(client, found)
    if kept is None:
        raise RunError(
            f"run {found.run}: its payload is not kept: it was too large for the history, or its "
            "job keeps none",
            run=found.run,
        )
    known = await Jobs(client).published(found.job, found.group)
    return copies(found, *kept, known, url)


def copies(
    found: Found, body: bytes, headers: Mapping[str, str], known: Published | None, url: str
) -> Copies:
    """A run in each form, with what is known about its job."""
    try:
        value = msgspec.json.decode(body) if body.strip() else msgspec.UNSET
        text = body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RunError(
            f"run {found.run}: its payload is not JSON, so it can only be published to its subject",
            run=found.run,
        ) from None
    replaces = bool(known and known.key)
    return Copies(
        _cli(found, text, headers, replaces),
        _python(found, value, headers, known, replaces),
        _curl(found, value, headers, replaces, url),
        text,
    )


def _cli(found: Found, text: str, headers: Mapping[str, str], replaces: bool) -> str:
    words = ["holdfast", "enqueue", found.job]
    long = len(text.encode()) > LONGEST_ARGUMENT
    if text.strip():
        words.append("-" if long else text)
    if found.group != DEFAULT_GROUP:
        words += ["--group", found.group]
    for name, value in headers.items():
        words += ["--header", f"{name}={value}"]
    if replaces:
        words += ["--on-duplicate", "replace"]
    source = f"holdfast runs copy {shlex.quote(found.run)} --as payload | " if long else ""
    return source + shlex.join(words)


def _python(
    found: Found,
    value: Any,
    headers: Mapping[str, str],
    known: Published | None,
    replaces: bool,
) -> str:
    options: dict[str, Any] = {"group": found.group} if found.group != DEFAULT_GROUP else {}
    options |= {"headers": dict(headers)} if headers else {}
    options |= {"on_duplicate": "replace"} if replaces else {}
    given = "".join(f"{name}={one!r}, " for name, one in options.items()).removesuffix(", ")
    job = f"app.jobs[{found.job!r}]" + (f".options({given})" if given else "")
    return "\n".join(
        [
            "import asyncio",
            "",
            "from YOUR_MODULE import app",
            "",
            "",
            "async def main() -> None:",
            "    async with app:",
            f"        run = await {job}.enqueue({_arguments(value, known)})",
            "        print(run.id, await run.result())",
            "",
            "",
            "asyncio.run(main())",
        ]
    )


def _arguments(value: Any, known: Published | None) -> str:
    """The arguments of `enqueue`: members by name where the payload is an object of several."""
    if value is msgspec.UNSET:
        return ""
    names: Sequence[str] = known.parameters if known else ()
    alone = len(names) == 1 and not (known and known.rest)
    if isinstance(value, dict) and not (alone and value.keys() != set(names)):
        if all(name.isidentifier() for name in value):
            return _lines([f"{name}={one!r}" for name, one in value.items()])
        return f"**{value!r}"
    return pprint.pformat(value, width=88, sort_dicts=False)


def _lines(arguments: Sequence[str]) -> str:
    line = ", ".join(arguments)
    if len(line) < 50:
        return line
    return "".join(f"\n            {one}," for one in arguments) + "\n        "


def _curl(found: Found, value: Any, headers: Mapping[str, str], replaces: bool, url: str) -> str:
    request: dict[str, Any] = {"job": found.job}
    if found.group != DEFAULT_GROUP:
        request["group"] = found.group
    if value is not msgspec.UNSET:
        request["payload"] = value
    if headers:
        request["headers"] = dict(headers)
    if replaces:
        request["on_duplicate"] = "replace"
    return " ".join(
        [
            f"curl -X POST {shlex.quote(url + '/api/v1/runs')}",
            "-H 'Content-Type: application/json'",
            '-H "Authorization: Bearer $HOLDFAST_TOKEN"',
            f"-d {shlex.quote(json.dumps(request, ensure_ascii=False))}",
        ]
    )

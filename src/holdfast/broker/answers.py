"""Answers: what the server says, as records and errors of our own.

A stream's confirmation is `Stored`; its refusal is one of `Conflict` (a comparison failed),
`NotFound`, `Unavailable` (never applied) or another `BrokerError`; a message is `Received`.

Guaranteed: a refusal carries the server's own words and number. Nothing here waits or retries.
Not here: answers that never come. The connection ends the wait for them in `OutcomeUnknown`.
"""

from __future__ import annotations

from asyncio import Future
from typing import Final

import msgspec
from nats.aio.msg import Msg

from holdfast import errors
from holdfast.broker.wire import Headers, parse_headers, parse_status
from holdfast.names import H_SEQUENCE

ENVELOPE_BYTES: Final = 16 * 1024
"""Kept free below the server's limit, so that a dead letter can carry the body and its story."""

CAS_REFUSED: Final = frozenset({10071, 10164, 10077})
"""The last: a subject that keeps its first message has one."""
_ID_IN_PROCESS: Final = 10158
"""A first copy of the message was taken in and is not stored yet: it may be, or not."""
_NO_SEQUENCE: Final = 10043
NO_STREAM: Final = 10059
"""The server's number for a stream that does not exist."""


class Stored(msgspec.Struct, frozen=True):
    """A stream's confirmation: at which sequence, and whether it was known already."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class ApiError(msgspec.Struct, frozen=True):
    """The server's own words about a refusal."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


class Received:
    """A message as it arrived; with a `status` it is the server's word and no message at all."""

    __slots__ = ("body", "description", "headers", "reply", "status", "subject")

    def __init__(
        self, subject: str, body: bytes, headers: Headers, reply: str, status: str = ""
    ) -> None:
        self.subject = subject
        self.body = body
        self.headers = headers
        self.reply = reply
        self.status = status
        self.description = ""

    @classmethod
    def of(cls, msg: Msg) -> Received:
        """As the library hands it over, which mixes the status with the sender's headers."""
        headers = msg.headers or {}
        return cls(msg.subject, msg.data, headers, msg.reply, headers.get("Status", ""))

    @classmethod
    def parsed(cls, subject: str, body: bytes, raw: bytes | None, reply: str) -> Received:
        """From the bytes of the wire.

        A stored message is one whatever its first line says: somebody else may have written it.
        """
        found = cls(subject, body, parse_headers(raw), reply)
        if H_SEQUENCE not in found.headers:
            found.status, found.description = parse_status(raw)
        return found


def read_ack_now(answer: Received) -> Stored:
    """A stream's answer as `Stored`, or the error that it carries."""
    if not answer.body:
        if answer.status == "503":
            raise errors.Unavailable("no stream takes this subject right now")
        raise errors.BrokerError(
            f"unexpected answer from the stream: {answer.status} {answer.description}"
        )
    ack = _decode_ack(answer.body)
    if ack.error is not None:
        raise api_error(ack.error)
    return Stored(ack.stream, ack.seq, ack.duplicate)


async def read_ack(future: Future[Received]) -> Stored:
    """Wait for a stream's answer."""
    return read_ack_now(await future)


def api_error(error: ApiError) -> errors.BrokerError:
    """The server's refusal as one of ours."""
    text = f"{error.description} ({error.err_code or error.code})"
    if error.err_code in CAS_REFUSED:
        return errors.Conflict(text)
    if error.err_code == _ID_IN_PROCESS:
        return errors.OutcomeUnknown(text)
    if error.code == 404 or error.err_code == _NO_SEQUENCE:
        return errors.NotFound(text)
    if error.code == 503:
        return errors.Unavailable(text)
    return errors.BrokerError(text)


def header_bytes(headers: Headers | None) -> int:
    """The size of headers on the wire, which counts against the server's limit."""
    if not headers:
        return 0
    return 12 + sum(len(k) + len(v.encode()) + 4 for k, v in headers.items())


def reason(error: BaseException | None) -> str:
    """The client's error in few words."""
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__

"""The short way in and out of the NATS client, which rests on members that are not public."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from holdfast.broker import Broker, Received
from holdfast.broker.wire import WireClient, header_bytes, parse_headers, parse_status, publish_line
from holdfast.config import ConnectionConfig
from holdfast.errors import NotConnected, PayloadTooLarge
from holdfast.server import Server
from holdfast.server.process import free_ports
from tests.integration.support import raw, until

Line = tuple[bytes, bytes, bytes, bytes | None]


@contextlib.asynccontextmanager
async def wired(server: Server) -> AsyncIterator[WireClient]:
    """A connected client."""
    client = WireClient()
    await client.connect(server.url, pending_size=0)
    try:
        yield client
    finally:
        await client.close()


def test_private_members_are_where_we_use_them() -> None:
    """A version of nats-py that moves what `WireClient` rests on fails here, not in production."""
    assert list(inspect.signature(Client._process_msg).parameters) == [
        "self",
        "sid",
        "subject",
        "reply",
        "data",
        "headers",
    ]
    assert inspect.iscoroutinefunction(Client._process_msg)
    for line in ("self._pending.append(cmd)", "self._pending_data_size += len(cmd)"):
        assert line in inspect.getsource(Client._send_command)
    assert inspect.iscoroutinefunction(Client._flush_pending)
    assert "_process_msg" in inspect.getsource(Parser.parse)
    client = Client()
    names = ("_flush_queue", "_server_info", "_subs", "_pending", "_pending_data_size", "_pongs")
    for name in names:
        assert hasattr(client, name), name
    for name in ("buf", "state", "needed"):
        assert hasattr(client._ps, name), name
    assert "await self._ps.parse(" in inspect.getsource(Client._read_loop)
    assert "_id" in inspect.getsource(Subscription.__init__)


async def test_flush_that_was_cancelled_leaves_the_connection_intact(nats: Server) -> None:
    """The PONG that comes for nobody is dropped, and the next flush gets its own."""
    async with wired(nats) as client:
        reading = client._reading_task
        for _ in range(20):
            flushing = asyncio.create_task(client.flush())
            while not client._pongs:
                await asyncio.sleep(0)
            flushing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flushing
        await client.flush()
        assert client.is_connected
        assert client._reading_task is reading
        assert not reading.done()


async def test_flush_is_cancelled_even_when_its_answer_is_there(nats: Server) -> None:
    """A task that is cancelled in the very moment in which the PONG arrives does not go on."""
    async with wired(nats) as client:
        flushing = asyncio.create_task(client.flush())
        while not client._pongs:
            await asyncio.sleep(0)
        client._pongs[0].set_result(True)
        flushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flushing


@pytest.mark.parametrize(
    "use",
    [
        "import nats.js.api; assert nats.js.api.Header",
        "from nats.js import JetStreamContext",
        "import nats; assert nats.NATS().jetstream()",
        "from nats.aio.client import Client; assert Client().jsm()",
    ],
)
def test_jetstream_client_is_imported_by_whoever_uses_it(use: str) -> None:
    """Holdfast needs none of it; other users of the library find it as ever."""
    code = (
        "import sys, holdfast.broker\n"
        "assert 'nats.js' not in sys.modules, 'loaded without need'\n"
        f"{use}\n"
        "assert 'nats.js' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_aiohttp_is_imported_by_whoever_uses_it() -> None:
    """nats-py would load it in every process, for websockets alone."""
    script = (
        "import sys, holdfast.broker\n"
        "assert 'aiohttp' not in sys.modules, 'loaded without need'\n"
        "import aiohttp\n"
        "assert aiohttp.ClientSession\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:parameter 'timeout' of type 'float':DeprecationWarning")
async def test_connection_over_a_websocket() -> None:
    """`ws://` in `nats_url` works where aiohttp is installed."""
    (port,) = free_ports(1)
    websocket = f"websocket {{ listen: '127.0.0.1:{port}', no_tls: true }}"
    with Server(fast=True, extra_config=websocket):
        async with Broker(ConnectionConfig(nats_url=f"ws://127.0.0.1:{port}")) as broker:
            assert (await broker.api("INFO"))["type"].endswith("account_info_response")


async def test_connected_client_has_what_write_needs(nats: Server) -> None:
    """Once connected there is a flush queue, a server's description and a payload limit."""
    async with wired(nats) as client:
        assert client._flush_queue is not None
        assert client._server_info["version"]
        assert client.max_payload == nats.max_payload


async def test_listener_gets_subject_reply_body_and_raw_headers(nats: Server) -> None:
    """`listen` calls a plain function straight from the parser, with everything still as bytes."""
    got: list[Line] = []
    async with wired(nats) as client, raw(nats) as (other, _):
        await client.listen("wire.*", lambda *line: got.append(line))
        await client.flush()
        await other.publish("wire.a", b"plain")
        await other.publish("wire.b", b"", reply="answer.here")
        await other.publish("wire.c", b"\x00\xff", headers={"A": "b"})
        await until(lambda: len(got) == 3, 5, "three messages")
    assert got[0][:3] == (b"wire.a", b"", b"plain")
    assert got[1][:3] == (b"wire.b", b"answer.here", b"")
    assert got[2][:3] == (b"wire.c", b"", b"\x00\xff")
    assert [parse_headers(line[3]) for line in got] == [{}, {}, {"A": "b"}]


async def test_listener_that_raises_does_not_end_the_connection(nats: Server) -> None:
    """A listener's error is noted; the next message arrives, and so do plain subscriptions."""
    got: list[bytes] = []
    noted: list[tuple[bytes, str]] = []

    def listener(subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        if body == b"bad":
            raise ValueError("no")
        got.append(body)

    async with wired(nats) as client:
        client.on_malformed = lambda subject, _, error: noted.append((subject, str(error)))
        await client.listen("wire.raise", listener)
        plain = await client.subscribe("wire.raise")
        for body in (b"bad", b"good"):
            client.write(publish_line("wire.raise", "", body, None))
        await until(lambda: got, 5, "the second message")
        assert [(await plain.next_msg(timeout=5)).data for _ in range(2)] == [b"bad", b"good"]
    assert noted == [(b"wire.raise", "no")]


async def test_listeners_and_subscriptions_survive_a_reconnect() -> None:
    """After the server is back, what was listened to is heard again."""
    got: list[bytes] = []
    with Server(fast=True) as server:
        async with Broker(ConnectionConfig(nats_url=server.url)) as broker:
            await broker.listen("wire.again", lambda s, r, body, h: got.append(body))
            back = asyncio.Event()
            broker.on_reconnect(back.set)
            await asyncio.to_thread(server.restart)
            await asyncio.wait_for(back.wait(), 10)
            await broker.publish("wire.again", b"x")
            await until(lambda: got == [b"x"], 5, "the message after the reconnect")


async def test_closed_connection_raises_our_own_errors(nats: Server) -> None:
    """No error of the NATS client leaves the broker, also when everything is over."""
    async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
        pass

    async def callback(message: Received) -> None: ...

    for act in (
        lambda: broker.publish("wire.closed"),
        lambda: broker.request("wire.closed"),
        lambda: broker.store("wire.closed", b""),
        lambda: broker.subscribe("wire.closed", callback),
        lambda: broker.listen("wire.closed", lambda *line: None),
        lambda: broker.api("INFO"),
        broker.flush,
    ):
        with pytest.raises(NotConnected):
            await act()


async def test_unsubscribed_listener_is_forgotten(nats: Server) -> None:
    """Nothing is kept of a subscription that has ended."""
    async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
        before = len(broker._nc._listeners)
        subscription = await broker.listen("wire.gone", lambda *line: None)
        assert len(broker._nc._listeners) == before + 1
        await broker.unsubscribe(subscription)
        assert len(broker._nc._listeners) == before


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (None, {}),
        (b"", {}),
        (b"NATS/1.0\r\nA: b\r\nC:d\r\n\r\n", {"A": "b", "C": "d"}),
        (b"NATS/1.0\r\nA: b: c \r\n\r\n", {"A": "b: c"}),
        (b"NATS/1.0\r\nA:\r\nno colon\r\n\r\n", {"A": ""}),
        (b"NATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n", {"A": "2"}),
        (b"NATS/1.0 503\r\n\r\n", {}),
        (b"NATS/1.0 100 Idle Heartbeat\r\n\r\n", {}),
        (
            b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 3\r\n\r\n",
            {"Nats-Pending-Messages": "3"},
        ),
        (b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n", {"A": "\ufffd\ufffd"}),
        (b"\xff\xff", {}),
    ],
)
def test_headers_are_parsed_whatever_they_are(block: bytes | None, found: dict[str, str]) -> None:
    """Status lines, repeated names, bytes that are no UTF-8: a dict, never an error."""
    assert parse_headers(block) == found


@pytest.mark.parametrize(
    ("block", "status"),
    [
        (None, ("", "")),
        (b"", ("", "")),
        (b"NATS/1.0\r\nStatus: 503\r\nDescription: mine\r\n\r\n", ("", "")),
        (b"NATS/1.0 503\r\n\r\n", ("503", "")),
        (b"NATS/1.0 408 Request Timeout\r\nStatus: 200\r\n\r\n", ("408", "Request Timeout")),
        (b"\xff\xff", ("", "")),
    ],
)
def test_status_is_the_first_line_and_no_header(
    block: bytes | None, status: tuple[str, str]
) -> None:
    """What a sender calls `Status` is a header like any other."""
    assert parse_status(block) == status


async def test_header_values_cannot_forge_a_line(nats: Server) -> None:
    """Line breaks in a value become spaces: no second header, no second message."""
    value = "a\r\nNats-Msg-Id: forged\r\n\r\nPUB wire.forged 1\r\nx"
    got: list[Line] = []
    async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
        await broker.listen("wire.>", lambda *line: got.append(line))
        await broker.publish("wire.crlf", b"body", {"A": value, "B": "\rb\n"})
        await broker.publish("wire.end", b"")
        await until(lambda: len(got) == 2, 5, "both messages")
    assert [line[0] for line in got] == [b"wire.crlf", b"wire.end"]
    headers = parse_headers(got[0][3])
    assert headers == {"A": value.replace("\r", " ").replace("\n", " "), "B": "b"}
    assert got[0][2] == b"body"


async def test_header_values_of_any_text_arrive(nats: Server) -> None:
    """Text beyond ASCII travels as UTF-8; half a surrogate pair does not break the message."""
    got: list[Line] = []
    async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
        await broker.listen("wire.text", lambda *line: got.append(line))
        await broker.publish("wire.text", b"", {"A": "é☃🎉", "B": "\ud800"})
        await until(lambda: got, 5, "the message")
    assert parse_headers(got[0][3]) == {"A": "é☃🎉", "B": "?"}


@pytest.mark.parametrize("headers", [None, {"A": "b"}, {"A": "é" * 50, "B": ""}])
async def test_largest_message_passes_and_one_byte_more_is_refused(
    nats: Server, headers: dict[str, str] | None
) -> None:
    """The limit is body plus headers to the byte; more is refused here, and nothing is cut off."""
    got: list[int] = []
    async with Broker(ConnectionConfig(nats_url=nats.url)) as broker:
        room = broker.max_message_bytes - header_bytes(headers)
        await broker.listen("wire.large", lambda s, r, body, h: got.append(len(body)))
        await broker.publish("wire.large", b"x" * room, headers)
        with pytest.raises(PayloadTooLarge) as caught:
            await broker.publish("wire.large", b"x" * (room + 1), headers)
        assert caught.value.size == caught.value.limit + 1
        await broker.publish("wire.large", b"still here", headers)
        await until(lambda: got == [room, 10], 5, "both messages that fit")
        assert broker.connected

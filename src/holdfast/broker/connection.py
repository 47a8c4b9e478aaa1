"""One connection to NATS, and every write that goes through it.

Guaranteed: publishes are checked (size with headers, names by the caller) before a byte is sent;
writes to a stream are pipelined through one reply inbox and end in exactly one of `Stored`,
`Conflict` (refused), `Unavailable` (never applied) or `OutcomeUnknown` (no answer came: an owner
token tells whether it was applied); a lost connection logs one line and is reestablished.

Not provided: buffering. While disconnected a publish raises `NotConnected` at once, since a message
that is sent minutes later may act on something that has a new owner. Nothing is retried here
either: only the caller knows what a repeat would do.

A server that is too old, or without JetStream, is refused when connecting.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import random
import secrets
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import nats
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from holdfast import errors
from holdfast.broker.connecting import (
    check_jetstream,
    check_version,
    connect_options,
    hopeless,
    inbox_prefix,
    request_guard,
    request_signer,
    shown_url,
)
from holdfast.broker.time import Measure, ServerTime
from holdfast.broker.unreadable import Unreadables
from holdfast.broker.wire import (
    NO_STREAM,
    ApiError,
    Headers,
    Listener,
    Received,
    Stored,
    WireClient,
    api_error,
    header_bytes,
    publish_line,
    read_ack_now,
    reason,
    sequence_of,
)
from holdfast.clock import Clock, SystemClock
from holdfast.config import ConnectionConfig
from holdfast.forks import closed_in_children
from holdfast.names import Names, pull_inbox

if TYPE_CHECKING:
    from holdfast.identity.requests import Requester, RequestGuard, RequestSigner

log = logging.getLogger("holdfast.broker")

PING_SECONDS: Final = 2
"""A frozen server or a silent network is noticed after two to three of these: well before the
liveness timeout of a process that could continue with another server."""
USELESS_SECONDS: Final = 10.0
"""A server through which nothing was written for this long may have lost its cluster: an election
is over sooner (4 to 8 s)."""

CALLBACKS: Final = ("error_cb", "disconnected_cb", "reconnected_cb", "closed_cb")

_LONGEST_SPREAD: Final = 30.0
"""The longest pause between two tries of one of many clients: a server that is down for so long is
not just restarting."""
_CLOSE_SECONDS: Final = 3.0
"""Timeout of an orderly close; a frozen server reads nothing."""
_SWEEP_SECONDS: Final = 0.25
"""How late a request may time out: little, compared to timeouts of seconds."""
_CLOCK_SECONDS: Final = 5.0
"""How soon a machine that slept measures the server's time again."""
_LOOK_SECONDS: Final = 2.0
"""Timeout of questions about the account, and the pause between two measurements of the server's
time."""
_FIXED: Final = {"pending_size": 0, "skip_subject_validation": True}
"""No buffering while disconnected; subjects are built in `holdfast.names` and checked there."""

Callback = Callable[[Received], Awaitable[None]]
Future = asyncio.Future
_Over = Callable[[Future[int]], object]
_Waiting = tuple[Future[Any], float, str, _Over | None]
"""A request: its future, deadline and subject, and what to call when it was a write of `put`."""


def _nothing(_: object) -> None:
    return None


def _fail(entry: _Waiting, error: Exception) -> bool:
    """End a request without an answer; False if nobody waits for it."""
    waited = not entry[0].done()
    if waited:
        entry[0].set_exception(error)
    if entry[3] is not None:
        entry[3](entry[0])
    return waited


class Broker:
    """One connection to NATS in one namespace. Use it as `async with`."""

    def __init__(
        self,
        config: ConnectionConfig,
        *,
        name: str = "holdfast",
        clock: Clock | None = None,
        options: Mapping[str, Any] | None = None,
        spread: float = 0.0,
    ) -> None:
        """`options` are passed on to the NATS client; callbacks among them are called too.

        `spread`: of many clients, each reconnects at its own time within these seconds.
        """
        self._spread = spread
        self._tries = 0
        self.config = config
        self._options = dict(options or {})
        self._theirs = {n: self._options.pop(n, None) for n in CALLBACKS}
        self.names = Names(config.namespace)
        self.clock = clock or SystemClock()
        self.time = ServerTime(self.clock)
        self._measuring: asyncio.Task[None] | None = None
        self.api_level = 0
        self.unreadable = Unreadables()
        """Counts and logs unreadable records and messages."""
        self.closed: asyncio.Event = asyncio.Event()
        self._name = name
        self._nc = WireClient()
        self._nc.on_malformed = self._on_malformed
        closed_in_children(self._nc)
        self._prefix = ""
        self._inbox = ""
        self._pull_inbox = ""
        self._refusals = 0
        self._opened = False
        self._tokens = itertools.count()
        self._pulls = itertools.count()
        self._waiting: dict[int, _Waiting] = {}
        self._loop: asyncio.AbstractEventLoop
        self._reconnected: list[Callable[[], None]] = []
        self._disconnected: list[Callable[[], None]] = []
        self._missed: list[Callable[[], None]] = []
        self.denied: dict[str, str] = {}
        """Subjects, in lower case, that the server forbids us, with its error."""
        self._sweeping: asyncio.TimerHandle | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lost_at: float | None = None
        self._confirmed = 0.0
        self._trouble: Exception | None = None
        self._refused = False  # whether a refused login was logged since the connection was lost
        self._closing = False

    # ---- request authentication

    @functools.cached_property
    def guard(self) -> RequestGuard:
        """Verifies who may send requests to this process; one per connection."""
        return request_guard(self.config)

    @functools.cached_property
    def _signer(self) -> RequestSigner | None:
        return request_signer(self.config, self.server_now)

    def signature(self, subject: str, body: bytes) -> Headers | None:
        """Headers that authenticate the caller; None if the login has no certificate."""
        return self._signer.sign(subject, body) if self._signer else None

    async def ask(self, subject: str, body: bytes = b"", timeout: float = 0) -> Received:
        """Send a request that changes something, signed with this process's login."""
        return await self.request(subject, body, self.signature(subject, body), timeout)

    def sender(self, message: Received, subject: str) -> Requester:
        """The authorized sender of a request; else `RequestRefused`.

        `subject` is the one that we listen on: the server may deliver a message under another.
        """
        return self.guard.check(message.headers, subject, message.body, self.server_now())

    # ---- life

    async def __aenter__(self) -> Broker:
        await self.open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def open(self, *, check: bool = True) -> None:
        """Connect and listen for replies; with `check`, refuse a server that is too old."""
        self._loop = asyncio.get_running_loop()
        await self._connect()
        try:
            await self._nc.listen(f"{self._inbox}.*", self._on_reply)
            self._watching = asyncio.create_task(self._watch_time(), name="holdfast-time")
            if check:
                check_version(self.server_version)
                self.api_level = await check_jetstream(self._account, self.clock)
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        options = connect_options(self.config)
        self._begin_again()
        self._inbox = self.new_inbox()
        servers = self.config.servers
        try:
            async with asyncio.timeout(self.config.connect_timeout_seconds):
                await self._nc.connect(
                    servers=servers,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    **(self._usual() | options | self._options | _FIXED),
                )
                self._opened = True
        except (TimeoutError, OSError, nats.errors.Error) as error:
            self._closing = True
            with contextlib.suppress(Exception):
                await self._nc.close()
            self._nc.abandon()
            raise self._not_connected(error) from None

    def _begin_again(self) -> None:
        """A connection that could not be opened may be opened later."""
        if not self._closing:
            return
        self._nc = WireClient()
        self._nc.on_malformed = self._on_malformed
        closed_in_children(self._nc)
        self._closing, self._opened = False, False
        self._trouble, self._refusals = None, 0
        self.closed.clear()

    def _pick(self, servers: list[Any], _: dict[str, Any]) -> tuple[None, float]:
        """When to try the next server: within a time that doubles with each try that failed."""
        self._tries += 1
        most = min(self._spread * 2.0 ** (self._tries - 1), max(self._spread, _LONGEST_SPREAD))
        return None, random.uniform(0.0, most)

    @property
    def refused(self) -> bool:
        """Whether the last try to connect failed for a reason that waiting does not cure."""
        return bool(hopeless(self._trouble))

    def _usual(self) -> dict[str, Any]:
        """Options that the caller's may replace."""
        return {
            "name": self._name,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": max(0.1, self._spread * random.uniform(0.5, 1.0)),
            "connect_timeout": 2,
            "ping_interval": PING_SECONDS,
            "max_outstanding_pings": 2,
            **({"reconnect_to_server_handler": self._pick} if self._spread else {}),
        }

    def _not_connected(self, error: Exception) -> errors.NotConnected:
        """The error of the last try: the NATS client itself only reports a timeout."""
        why = reason(self._trouble or error)
        url = shown_url(self.config.nats_url)
        if what := hopeless(self._trouble):
            return errors.NotConnected(f"NATS at {url} {what}")
        return errors.NotConnected(
            f"cannot reach NATS at {url} ({why}): "
            "start one with 'holdfast server', or set HOLDFAST_NATS_URL"
        )

    async def close(self) -> None:
        """Flush what was published and disconnect."""
        self._closing = True
        for task in (self._watching, self._measuring):
            if task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._watching = None
        if self._sweeping:
            self._sweeping.cancel()
            self._sweeping = None
        if self._nc.is_connected:
            with contextlib.suppress(Exception):
                await self._nc.flush(timeout=2)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_CLOSE_SECONDS):  # a frozen server reads nothing
                await self._nc.close()
        self._nc.abandon()
        await self._end_reconnecting()
        self._fail_waiting(errors.OutcomeUnknown("the connection was closed before an answer came"))

    async def _end_reconnecting(self) -> None:
        """The library's reconnecting may swallow its cancellation and continue forever."""
        task = self._nc._reconnection_task
        while task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.1)

    async def leave(self) -> None:
        """Reconnect to a random server, because this one is connected but useless."""
        if self._nc.is_connected:
            self._confirmed = self.clock.monotonic()
            url = self._nc.connected_url
            log.warning("leaving the server %s: it does not answer", url.netloc if url else "?")
            await self._nc.force_reconnect()

    async def use_login(self, seed: str) -> None:
        """Switch to another login of the same user, and reconnect with it."""
        self._nc._nkeys_seed_str = seed
        self._nc._setup_nkeys_seed_connect()
        if self._nc.is_connected:
            await self._nc.force_reconnect()

    async def leave_if_useless(self) -> None:
        """Leave this server if no write through it was confirmed for a while."""
        if self.clock.monotonic() - self._confirmed > USELESS_SECONDS:
            await self.leave()

    @property
    def client(self) -> Any:
        """The NATS client, for code that was written for it and shares this connection."""
        return self._nc

    @property
    def connected(self) -> bool:
        return self._nc.hears

    @property
    def connection_id(self) -> tuple[str, int]:
        """The server's id and the number of this connection there; new after a reconnect."""
        if not self._nc.is_connected:
            return "", 0
        return str(self._nc._server_info.get("server_id", "")), self._nc.client_id or 0

    @property
    def max_message_bytes(self) -> int:
        return int(self._nc.max_payload)

    @property
    def server_version(self) -> str:
        return str(self._nc._server_info.get("version", ""))  # the parsed form drops pre-releases

    @property
    def cluster_name(self) -> str:
        return str(self._nc._server_info.get("cluster", ""))

    @property
    def known_servers(self) -> int:
        """How many nodes the server knows of, itself included."""
        return max(1, len(self._nc._server_info.get("connect_urls") or []))

    @property
    def encrypted(self) -> bool:
        """Whether the connection uses TLS."""
        info = self._nc._server_info
        return bool(info.get("tls_required")) or self.config.tls_handshake == "first"

    @property
    def asks_login(self) -> bool:
        """Whether the server requires a login."""
        return bool(self._nc._server_info.get("auth_required"))

    def server_now(self) -> float:
        """The server's time: the only one to compare with another machine's."""
        return self.time.now()

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each reconnect; returns a function that unsubscribes."""
        self._reconnected.append(callback)
        return lambda: self._reconnected.remove(callback)

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back after each loss of the connection; returns a function that unsubscribes."""
        self._disconnected.append(callback)
        return lambda: self._disconnected.remove(callback)

    def on_missing(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back when a stream seems to be missing; returns a function that unsubscribes."""
        self._missed.append(callback)
        return lambda: self._missed.remove(callback)

    def _tell_missing(self) -> None:
        for callback in list(self._missed):
            callback()

    # ---- publishing

    async def publish(
        self, subject: str, body: bytes = b"", headers: Headers | None = None, reply: str = ""
    ) -> None:
        """Send without waiting: acks, pings, notifications."""
        self.tell(subject, body, headers, reply)

    def tell(
        self, subject: str, body: bytes = b"", headers: Headers | None = None, reply: str = ""
    ) -> None:
        """The same without a coroutine."""
        self._nc.write(self._line(subject, reply, body, headers))

    async def publish_all(self, messages: Sequence[tuple[str, bytes, Headers]]) -> None:
        """Send many at once, and do not wait."""
        lines = [self._line(subject, "", body, headers) for subject, body, headers in messages]
        self._nc.write(b"".join(lines))

    async def store(
        self, subject: str, body: bytes, headers: Headers | bytes | None = None
    ) -> Stored:
        """Write to a stream and wait for its confirmation."""
        try:
            stored = read_ack_now(await self.post(subject, body, headers))
        except errors.Unavailable:
            self._tell_missing()
            raise
        self._confirmed = self.clock.monotonic()
        return stored

    async def send(
        self, subject: str, body: bytes, headers: Headers | None = None, timeout: float = 0
    ) -> Future[Received]:
        """Send with a reply subject; the future gets the answer. Many may be in flight."""
        return self.post(subject, body, headers, timeout)

    def post(
        self,
        subject: str,
        body: bytes,
        headers: Headers | bytes | None = None,
        timeout: float = 0,
    ) -> Future[Received]:
        """The same without a coroutine."""
        return self._post(subject, body, headers, timeout)

    def put(
        self,
        subject: str,
        body: bytes,
        headers: Headers | bytes | None,
        over: _Over | None = None,
    ) -> Future[int]:
        """Write to a stream; the future gets the sequence, or raises what `store` would.

        For the writes that every run makes: no coroutine, and only the sequence is read. `over` is
        called at once when the write has ended in any way.
        """
        return self._post(subject, body, headers, 0, over or _nothing)

    def _post(
        self,
        subject: str,
        body: bytes,
        headers: Headers | bytes | None,
        timeout: float,
        over: _Over | None = None,
    ) -> Future[Any]:
        number = next(self._tokens)
        self._nc.write(self._line(subject, f"{self._inbox}.{number}", body, headers))
        future: Future[Any] = self._loop.create_future()
        deadline = self.clock.monotonic() + (timeout or self.config.request_timeout_seconds)
        self._waiting[number] = (future, deadline, subject, over)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)
        return future

    async def request(
        self, subject: str, body: bytes = b"", headers: Headers | None = None, timeout: float = 0
    ) -> Received:
        """Send a request and wait for one answer; raises `Unavailable` if nobody listens."""
        answer = await self.post(subject, body, headers, timeout)
        if answer.status == "503":
            raise errors.Unavailable(f"nobody answers on {subject}")
        return answer

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """Receive what is published on a subject; survives reconnects."""

        async def receive(msg: Msg) -> None:
            await callback(Received.of(msg))

        try:
            return await self._nc.subscribe(subject, queue=queue, cb=receive)
        except (nats.errors.Error, OSError) as error:
            raise errors.NotConnected(f"not connected to NATS ({reason(error)})") from None

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Stop receiving, once what is under way has arrived."""
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            await subscription.unsubscribe()
            if self._nc.hears:
                await self._nc.flush(timeout=1)
        self._nc.forget(subscription)

    async def flush(self) -> None:
        """Return when the server has processed everything sent so far."""
        try:
            await self._nc.flush(timeout=max(1, int(self.config.request_timeout_seconds)))
        except (nats.errors.Error, OSError) as error:
            raise errors.NotConnected(f"not connected to NATS ({reason(error)})") from None

    def new_inbox(self) -> str:
        """A new subject for answers."""
        self._prefix = self._prefix or inbox_prefix(self.config)
        return f"{self._prefix}.{secrets.token_hex(11)}"

    @property
    def pull_inbox(self) -> str:
        """The subject below which pulled messages arrive on this connection."""
        if not self._pull_inbox:
            self._prefix = self._prefix or inbox_prefix(self.config)
            self._pull_inbox = pull_inbox(self._prefix, secrets.token_hex(11))
        return self._pull_inbox

    def new_pull_inbox(self) -> str:
        """One consumer's subject below `pull_inbox`; the first is 0, where coordinators probe."""
        return f"{self.pull_inbox}.{next(self._pulls)}"

    async def listen(self, subject: str, listener: Listener) -> Subscription:
        """Receive by a plain function that the parser calls directly, without a task."""
        try:
            return await self._nc.listen(subject, listener)
        except (nats.errors.Error, OSError) as error:
            raise errors.NotConnected(f"not connected to NATS ({reason(error)})") from None

    def _line(
        self, subject: str, reply: str, body: bytes, headers: Headers | bytes | None
    ) -> bytes:
        """The bytes to send; too many would make the server close the connection."""
        line = publish_line(subject, reply, body, headers)
        if len(line) > self._nc.max_payload:
            size = len(body) + header_bytes(headers)
            if size > self._nc.max_payload:
                raise errors.PayloadTooLarge(size, self._nc.max_payload)
        return line

    # ---- JetStream's API

    async def api(
        self, subject: str, body: dict[str, Any] | None = None, timeout: float = 0
    ) -> dict[str, Any]:
        """Call `$JS.API.<subject>`; raises `NotFound`, `Conflict` or `BrokerError` on refusal."""
        data = msgspec.json.encode(body) if body is not None else b""
        answer = await self.request(f"$JS.API.{subject}", data, timeout=timeout)
        try:
            result: dict[str, Any] = msgspec.json.decode(answer.body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise errors.BrokerError(f"unreadable answer from $JS.API.{subject}") from None
        if error := result.get("error"):
            refusal = msgspec.convert(error, ApiError)
            if refusal.err_code == NO_STREAM:
                self._tell_missing()
            raise api_error(refusal)
        return result

    async def _account(self) -> dict[str, Any]:
        return await self.api("INFO", timeout=_LOOK_SECONDS)

    # ---- replies and callbacks

    def _on_reply(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        entry = self._waiting.pop(int(subject[len(self._inbox) + 1 :]), None)
        if entry is None:
            return
        future, _, _, over = entry
        if future.done():  # nobody waits for it
            _fail(entry, errors.OutcomeUnknown("its writer was cancelled"))
            return
        if over is None:
            future.set_result(Received.parsed("", body, headers, reply.decode()))
            return
        try:
            found = sequence_of(body, headers)
        except errors.BrokerError as error:
            if isinstance(error, errors.Unavailable):
                self._tell_missing()
            _fail(entry, error)
        else:
            self._confirmed = self.clock.monotonic()
            future.set_result(found)
            over(future)

    def _sweep(self) -> None:
        """Fail requests that were not answered in time; called while any are waiting."""
        self._sweeping = None
        now = self.clock.monotonic()
        for number in [n for n, entry in self._waiting.items() if entry[1] <= now]:
            late = errors.OutcomeUnknown("no answer from NATS in time")
            _fail(self._waiting.pop(number), late)
        if self._waiting and self._sweeping is None:
            self._sweeping = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    async def _watch_time(self) -> None:
        while True:
            await asyncio.sleep(_CLOCK_SECONDS)
            self._keep_time()

    def _keep_time(self) -> None:
        """Measure the server's time again if the last measurement is doubtful."""
        busy = self._measuring is not None and not self._measuring.done()
        if self.connected and not busy and self.time.doubtful and self.time.measure is not None:
            task = self._measure_again(self.time.measure)
            self._measuring = asyncio.create_task(task, name="holdfast-clock")

    async def _measure_again(self, measure: Measure) -> None:
        try:
            await measure()
        except errors.BrokerError as error:
            log.debug("the server's clock could not be read: %s", error)
        await self.clock.sleep(_LOOK_SECONDS)

    def _fail_waiting(self, error: errors.BrokerError) -> None:
        waiting, self._waiting = self._waiting, {}
        for entry in waiting.values():
            if _fail(entry, error):
                entry[0].exception()  # marks it as retrieved: nobody may be waiting

    async def _on_error(self, error: Exception) -> None:
        if not hopeless(self._trouble):
            self._trouble = error
        if isinstance(error, ssl.SSLError):
            self._nc.abandon()
        self._give_up_if_hopeless(error)
        text = str(error)
        if "permissions violation" in text.lower():
            log.error("NATS refused: %s", text)
            subject = text.split('"')[1].lower() if '"' in text else ""  # the client lower-cases it
            self.denied[subject] = text
            self._deny_waiting(subject, text)
        elif self._opened and not self._refused and (what := hopeless(error)):
            self._refused = True
            log.error("NATS %s; retrying", what)
        else:
            log.debug("nats: %s", reason(error))
        await self._tell("error_cb", error)

    def _give_up_if_hopeless(self, error: Exception) -> None:
        """While connecting: give up once there were as many refusals as servers.

        Raised into the client's loop of attempts, which would otherwise continue until the timeout.
        An established connection keeps trying: its login may be restored.
        """
        if not self._opened and hopeless(error):
            self._refusals += 1
            if self._refusals >= len(self.config.servers):
                raise error

    async def _tell(self, callback: str, *facts: Any) -> None:
        """Call the caller's callback, if there is one; its errors are only logged."""
        if theirs := self._theirs[callback]:
            try:
                await theirs(*facts)
            except Exception:
                log.exception("%s raised", callback)

    def _deny_waiting(self, subject: str, text: str) -> None:
        """Fail requests on a subject that the server forbids us."""
        unanswerable = subject.startswith(self._inbox.lower())  # no answer can arrive
        for number, entry in list(self._waiting.items()):
            if (unanswerable or entry[2].lower() == subject) and not entry[0].done():
                del self._waiting[number]
                reason = (
                    f"{text}: use a login whose role may do this, or allow it for this user in the "
                    "server's configuration"
                )
                _fail(entry, errors.PermissionDenied(reason.removeprefix("nats: ")))

    def _on_malformed(self, subject: bytes, body: bytes, error: Exception) -> None:
        place = subject.decode("ascii", "backslashreplace")
        said = errors.Unreadable(f"the message cannot be parsed: {type(error).__name__}")
        self.unreadable.note("messages", place, said, body)

    async def _on_disconnected(self) -> None:
        self._fail_waiting(errors.OutcomeUnknown("the connection was lost before an answer came"))
        await self._tell("disconnected_cb")
        if self._closing:
            return
        if self._lost_at is None:
            self._lost_at = self.clock.monotonic()
            log.warning("connection to NATS lost, reconnecting")
        for callback in list(self._disconnected):
            callback()

    async def _on_reconnected(self) -> None:
        away = self.clock.monotonic() - (self._lost_at or self.clock.monotonic())
        self._lost_at, self._refused, self._tries = None, False, 0
        self.denied.clear()  # a login may have been renewed
        url = self._nc.connected_url
        log.info("connected to NATS again (%s) after %.1f s", url.netloc if url else "?", away)
        for callback in list(self._reconnected):
            callback()
        await self._tell("reconnected_cb")

    async def _on_closed(self) -> None:
        if self._opened:
            self.closed.set()
        await self._tell("closed_cb")
        if not self._closing:
            log.error("the connection to NATS is closed for good: %s", reason(self._nc.last_error))

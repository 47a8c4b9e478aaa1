"""A lean NATS connection: blocking sockets, the standard library, only what a keeper needs.

It connects to one of several servers, with TLS and every kind of login a worker may have, learns of
further servers from the one it is connected to, publishes, sends requests and subscribes. It has no
thread and no loop: its owner polls `fileno` and calls `receive`. Any failure takes the connection
down; `keep` reconnects to the next server after a short wait. Credentials and certificates are read
at each attempt, so renewed files are used.

Not supported: websockets (a worker that uses them sends heartbeats from its own loop).
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import socket
import struct
import sys
import time
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

CONNECT_SECONDS: Final = 2.0
"""Timeout of connecting and logging in, including TLS; then the next server is tried."""
SEND_SECONDS: Final = 1.0
"""A server that accepts no data for this long is dropped: the owner must not be blocked."""
PING_SECONDS: Final = 2.0
"""The same as the worker's: a frozen server is noticed after two to three of these."""
RETRY_SECONDS: Final = 0.1
RETRY_MOST_SECONDS: Final = 0.5
"""First and longest wait between two attempts: short, because heartbeats wait for the
connection."""
PORT: Final = 4222
"""The port of a server whose address names none."""


class LinkMessage(NamedTuple):
    """A message and the id of its subscription."""

    sid: int
    subject: str
    reply: str
    headers: bytes
    body: bytes

    @property
    def status(self) -> str:
        """The server's status, such as 503 for "no responders"."""
        return self.headers[9:12].decode("ascii", "replace").strip()


class LinkError(Exception):
    """The connection cannot be made, or is lost."""


class Link:
    """One connection, made again whenever it is lost."""

    def __init__(self, login: dict[str, Any], name: str, subjects: dict[int, str]) -> None:
        """`login` is a worker's connection, as `holdfast.worker.keeping` describes it."""
        self.connections = 0
        self.trouble = ""
        self._login = login
        self._name = name
        self._subjects = subjects
        self._servers: list[str] = list(login["servers"])
        self._known = {_address(url)[:2] for url in self._servers}
        self._socket: Any = None
        self._buffer = b""
        self._unanswered = 0
        self._next_ping = 0.0
        self._not_before = 0.0
        self._wait = RETRY_SECONDS
        random.shuffle(self._servers)

    @property
    def up(self) -> bool:
        return self._socket is not None

    def fileno(self) -> int:
        return int(self._socket.fileno())

    # ---- connecting

    def keep(self, now: float) -> bool:
        """Connect if it is time to; True if a connection was just made."""
        if self._socket is not None:
            self._watch(now)
            return False
        if now < self._not_before:
            return False
        url = self._servers.pop(0)
        self._servers.append(url)
        try:
            self._connect(url)
        except (OSError, ValueError, KeyError, ImportError, LinkError) as error:
            self.trouble = f"{type(error).__name__}: {error}"
            self.drop()
            self._not_before = now + self._wait * random.uniform(0.5, 1.0)
            self._wait = min(self._wait * 1.5, RETRY_MOST_SECONDS)
            return False
        self.trouble, self._wait = "", RETRY_SECONDS
        self.connections += 1
        return True

    def _connect(self, url: str) -> None:
        host, port, user, password = _address(url)
        self._buffer, self._unanswered = b"", 0
        self._next_ping = time.monotonic() + PING_SECONDS
        raw = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
        self._socket = raw
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first = self._login.get("tls_first", False)
        if first:
            self._encrypt(host)
        info = json.loads(self._line().removeprefix(b"INFO "))
        if not first and (self._login.get("tls") or info.get("tls_required")):
            self._encrypt(host)
        self._learn(info, url)
        hello = {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": self._login.get("version", ""),
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "echo": self._login.get("echo", False),
            "name": self._name,
            **self._credentials(info, user, password),
        }
        lines = [f"CONNECT {json.dumps(hello)}"]
        lines += [f"SUB {subject} {sid}" for sid, subject in self._subjects.items()]
        self.send("".join(f"{line}\r\n" for line in [*lines, "PING"]).encode())
        while (line := self._line()) != b"PONG":
            if line.startswith(b"-ERR"):
                raise LinkError(line.decode("utf-8", "replace"))
            if line.startswith((b"MSG", b"HMSG")):  # a message before the PONG: connected
                self._buffer = line + b"\r\n" + self._buffer
                break
        self._socket.settimeout(SEND_SECONDS)

    def _encrypt(self, host: str) -> None:
        import ssl

        options = self._login
        context = ssl.create_default_context(cafile=options.get("tls_ca") or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if options.get("tls_cert"):
            context.load_cert_chain(options["tls_cert"], options.get("tls_key") or None)
        name = options.get("tls_hostname") or host
        if (host, 0) in self._known_hosts():
            name = options.get("tls_hostname") or self._configured_host()
        self._socket = context.wrap_socket(self._socket, server_hostname=name)

    def _known_hosts(self) -> set[tuple[str, int]]:
        """Hosts learned from a server only: their certificates carry the configured name."""
        given = {_address(url)[0] for url in self._login["servers"]}
        return {(_address(url)[0], 0) for url in self._servers if _address(url)[0] not in given}

    def _configured_host(self) -> str:
        return _address(self._login["servers"][0])[0]

    def _learn(self, info: dict[str, Any], url: str) -> None:
        scheme = urlsplit(url if "://" in url else f"nats://{url}").scheme
        for told in info.get("connect_urls") or ():
            address = _address(f"{scheme}://{told}")[:2]
            if address not in self._known:
                self._known.add(address)
                self._servers.append(f"{scheme}://{told}")

    def _credentials(self, info: dict[str, Any], user: str, password: str) -> dict[str, str]:
        login = self._login
        if login.get("user"):
            return {"user": login["user"], "pass": login["password"]}
        if login.get("token"):
            return {"auth_token": login["token"]}
        jwt, seed = "", ""
        if path := login.get("credentials_file"):
            with open(path, "rb") as file:
                seed = json.load(file)["nkey_seed"]
        elif path := login.get("nkey_seed_file"):
            with open(path, "rb") as file:
                seed = file.read().decode().strip()
        elif path := login.get("creds_file"):
            with open(path, "rb") as file:
                jwt, seed = _creds(file.read().decode())
        if seed:
            return self._signed(seed, jwt, str(info.get("nonce", "")))
        if user:
            return {"user": user, "pass": password} if password else {"auth_token": user}
        return {}

    def _signed(self, seed: str, jwt: str, nonce: str) -> dict[str, str]:
        sys.path.extend(path for path in self._login["paths"] if path not in sys.path)
        import nkeys

        pair = nkeys.from_seed(bytearray(seed.encode()))
        signature = base64.b64encode(pair.sign(nonce.encode())).decode()
        if jwt:
            return {"jwt": jwt, "sig": signature}
        return {"nkey": pair.public_key.decode(), "sig": signature}

    def _line(self) -> bytes:
        """Wait for one line; only while connecting."""
        while b"\r\n" not in self._buffer:
            self._buffer += self._read()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    # ---- connected

    def _watch(self, now: float) -> None:
        if now >= self._next_ping:
            if self._unanswered >= 2:
                self.trouble = "the server does not answer"
                self.drop()
                return
            self._next_ping = now + PING_SECONDS
            self._unanswered += 1
            with contextlib.suppress(LinkError):
                self.send(b"PING\r\n")

    def drop(self) -> None:
        """Close the connection; unsent data is dropped."""
        held, self._socket = self._socket, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                held.close()

    def send(self, data: bytes) -> None:
        """Send protocol lines; raises `LinkError` if the connection is lost."""
        if self._socket is None:
            raise LinkError("not connected")
        try:
            self._socket.sendall(data)
        except OSError as error:
            self.drop()
            raise LinkError(str(error)) from None

    def publish(self, subject: str, body: bytes, reply: str = "", headers: str = "") -> None:
        """Send a message, optionally with an encoded block of headers."""
        if headers:
            head = headers.encode()
            line = f"HPUB {subject} {reply} {len(head)} {len(head) + len(body)}\r\n".encode()
            self.send(line + head + body + b"\r\n")
        else:
            self.send(f"PUB {subject} {reply} {len(body)}\r\n".encode() + body + b"\r\n")

    def flush(self, seconds: float) -> None:
        """Wait until the server has received everything; used only before the keeper ends."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(LinkError):
            self.send(b"PING\r\n")
            self._unanswered += 1
            waiting = self._unanswered
            while self._unanswered >= waiting and time.monotonic() < deadline:
                self.receive()

    def receive(self) -> list[LinkMessage]:
        """The messages that have arrived; empty if there are none or the connection is lost."""
        try:
            self._buffer += self._read()
            while getattr(self._socket, "pending", int)():
                self._buffer += self._read()
            found = []
            while (message := self._next()) is not None:
                found.append(message)
        except TimeoutError:
            return []
        except (OSError, LinkError, ValueError, IndexError) as error:
            self.trouble = str(error)
            self.drop()
            return []
        return [message for message in found if message.sid]

    def _read(self) -> bytes:
        data = bytes(self._socket.recv(65_536))
        if not data:
            raise LinkError("the server closed the connection")
        return data

    def _next(self) -> LinkMessage | None:
        """The next complete operation in the buffer; sid 0 if it is not a message."""
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return None
        nothing = LinkMessage(0, "", "", b"", b"")
        word = line[:4].upper()
        if word in (b"MSG ", b"HMSG"):
            parts = line.decode("utf-8", "replace").split()
            size = int(parts[-1])
            head = int(parts[-2]) if word == b"HMSG" else 0
            if len(rest) < size + 2:
                return None
            self._buffer = rest[size + 2 :]
            named = len(parts) - (5 if word == b"HMSG" else 4)
            reply = parts[3] if named else ""
            return LinkMessage(int(parts[2]), parts[1], reply, rest[:head], rest[head:size])
        self._buffer = rest
        if word == b"PING":
            self.send(b"PONG\r\n")
        elif word == b"PONG":
            self._unanswered = max(0, self._unanswered - 1)
        elif word == b"INFO":
            self._learn(json.loads(line[5:]), self._servers[-1])
        elif word == b"-ERR" and b"ermissions" not in line:
            raise LinkError(line.decode("utf-8", "replace"))
        return nothing


def _address(url: str) -> tuple[str, int, str, str]:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host, port = parts.hostname or "127.0.0.1", parts.port or PORT
    return host, port, unquote(parts.username or ""), unquote(parts.password or "")


def _creds(text: str) -> tuple[str, str]:
    """The JWT and the seed of a `.creds` file."""
    lines = iter(text.splitlines())
    blocks = [next(lines, "").strip() for line in lines if line.startswith("-----BEGIN")]
    if len(blocks) < 2:
        raise LinkError("the creds file has no JWT with its seed")
    return blocks[0], blocks[1]

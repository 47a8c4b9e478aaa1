"""Files between jobs: every store keeps the same promises."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from holdfast import Holdfast
from holdfast.broker import Broker
from holdfast.config import ConnectionConfig
from holdfast.errors import ConfigError, NotFound, Unavailable
from holdfast.integrations.objects import (
    JetstreamObjects,
    MemoryObjects,
    ObjectStore,
    S3Objects,
    objects,
    sign,
)
from holdfast.server import Cluster, Server

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
"""The example credentials of Amazon's documentation."""
LARGE = bytes(range(256)) * 16_000  # about 4 MB: more than one message can carry


class S3(BaseHTTPRequestHandler):
    """A bucket that checks every signature as S3 does."""

    kept: ClassVar[dict[str, bytes]] = {}

    def _body(self) -> bytes | None:
        """The body of a request that is signed as it should be; else it is refused."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = f"http://{self.headers['Host']}{self.path}"
        moment = self.headers["x-amz-date"]
        now = datetime.strptime(moment, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        wanted = sign(self.command, url, body, KEY, SECRET, region="auto", now=now)
        hashed = self.headers["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()
        if hashed and self.headers["Authorization"] == wanted["Authorization"]:
            return body
        self.send_error(403)
        return None

    def do_PUT(self) -> None:
        body = self._body()
        if body is not None:
            self.kept[unquote(urlsplit(self.path).path)] = body
            self.send_response(200)
            self.end_headers()

    def do_GET(self) -> None:
        if self._body() is None:
            return
        found = self.kept.get(unquote(urlsplit(self.path).path))
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        self.wfile.write(found or b"")

    def log_message(self, *args: object) -> None: ...


@contextmanager
def s3() -> Iterator[str]:
    """A server that keeps one bucket."""
    with ThreadingHTTPServer(("127.0.0.1", 0), S3) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            S3.kept.clear()


async def _promises(store: ObjectStore) -> None:
    for name, body in {"images/a b+ü.png": b"small", "large": LARGE, "empty": b""}.items():
        await store.put(name, body)
        assert await store.get(name) == body
    await store.put("large", b"less")
    assert await store.get("large") == b"less", "a repeat overwrites"
    with pytest.raises(NotFound):
        await store.get("images/nothing")


async def test_memory_keeps_its_promises() -> None:
    """What was put is what is got; what was not is not found."""
    await _promises(MemoryObjects())


async def test_jetstream_keeps_its_promises(nats: Server, namespace: str) -> None:
    """The same in the object store of the app's namespace."""
    async with Holdfast("files", nats_url=nats.url, namespace=namespace) as app:
        await _promises(JetstreamObjects(app))


async def test_s3_keeps_its_promises() -> None:
    """The same in a bucket that refuses what is not signed as Amazon says."""
    with s3() as endpoint:
        await _promises(S3Objects("pictures", endpoint, KEY, SECRET))
        with pytest.raises(Unavailable, match="403"):
            await S3Objects("pictures", endpoint, KEY, "wrong").put("a", b"b")
    with pytest.raises(Unavailable, match="cannot be reached"):
        await S3Objects("pictures", endpoint, KEY, SECRET).get("a")


def test_signature_is_that_of_amazons_specification() -> None:
    """Computed a second way, from the text of Signature Version 4, step by step."""
    import hmac

    now = datetime(2013, 5, 24, tzinfo=UTC)
    url = "https://examplebucket.s3.amazonaws.com/test.txt"
    found = sign("GET", url, b"", KEY, SECRET, region="us-east-1", now=now)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    canonical = (
        "GET\n/test.txt\n\nhost:examplebucket.s3.amazonaws.com\n"
        f"x-amz-content-sha256:{empty}\nx-amz-date:20130524T000000Z\n\n"
        f"host;x-amz-content-sha256;x-amz-date\n{empty}"
    )
    text = (
        "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
        + hashlib.sha256(canonical.encode()).hexdigest()
    )
    key = b"AWS4" + SECRET.encode()
    for part in (b"20130524", b"us-east-1", b"s3", b"aws4_request"):
        key = hmac.new(key, part, hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    assert re.search(r"Signature=(\w+)", found["Authorization"])[1] == signature  # type: ignore[index]


def test_store_is_chosen_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing: JetStream. Otherwise what OBJECTS_URL says; a mistake is told."""
    app = Holdfast("files")
    monkeypatch.delenv("OBJECTS_URL", raising=False)
    assert isinstance(objects(app), JetstreamObjects)
    monkeypatch.setenv("OBJECTS_URL", "memory:")
    assert isinstance(objects(app), MemoryObjects)
    monkeypatch.setenv("OBJECTS_KEY", KEY)
    monkeypatch.setenv("OBJECTS_SECRET", SECRET)
    assert isinstance(objects(app, "s3://bucket?endpoint=https://r2.example.com"), S3Objects)
    for wrong in ("ftp://bucket", "s3://?endpoint=https://a.b", "s3://b?endpoint=file:///etc"):
        with pytest.raises(ConfigError):
            objects(app, wrong)
    monkeypatch.delenv("OBJECTS_SECRET")
    with pytest.raises(ConfigError, match="OBJECTS_SECRET"):
        objects(app, "s3://bucket?endpoint=https://r2.example.com")


async def test_objects_have_as_many_copies_as_the_streams(cluster: Cluster, namespace: str) -> None:
    """What a record refers to is not lost with one server."""
    async with Holdfast("files", nats_url=cluster.url, namespace=namespace) as app:
        await JetstreamObjects(app).put("a", b"b")
    config = ConnectionConfig(nats_url=cluster.url, namespace=namespace)
    async with Broker(config, name="look") as broker:
        info = await broker.api(f"STREAM.INFO.OBJ_{broker.names.objects}")
    assert info["config"]["num_replicas"] == 3

"""Files between jobs: every store keeps the same promises."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        given = dict(re.findall(r"(\w+)=([^,\s]+)", self.headers["Authorization"]))
        digest = self.headers["x-amz-content-sha256"]
        whole = digest == hashlib.sha256(body).hexdigest()
        if whole and given["Signature"] == self._signature(given["SignedHeaders"], digest):
            return body
        self.send_error(403)
        return None

    def _signature(self, names: str, digest: str) -> str:
        """Computed from the text of Signature Version 4, step by step."""
        moment = self.headers["x-amz-date"]
        scope = f"{moment[:8]}/auto/s3/aws4_request"
        lines = "".join(f"{n}:{self.headers[n].strip()}\n" for n in names.split(";"))
        path, _, query = self.path.partition("?")
        canonical = "\n".join((self.command, path, query, lines, names, digest))
        hashed = hashlib.sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashed}"
        key = b"AWS4" + SECRET.encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.digest(key, text.encode(), "sha256").hex()

    def do_PUT(self) -> None:
        body = self._body()
        if body is not None:
            self.kept[unquote(urlsplit(self.path).path)] = body
            self._answer(200, b"")

    def do_GET(self) -> None:
        if self._body() is None:
            return
        found = self.kept.get(unquote(urlsplit(self.path).path))
        self._answer(200 if found is not None else 404, found or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.md5(body).hexdigest()}"')
        self.send_header("Last-Modified", self.date_time_string())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

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
        with pytest.raises(Unavailable, match="could not be stored"):
            await S3Objects("pictures", endpoint, KEY, "wrong").put("a", b"b")
    with pytest.raises(Unavailable, match="could not be read"):
        await S3Objects("pictures", endpoint, KEY, SECRET).get("a")


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

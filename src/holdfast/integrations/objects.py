"""Files between jobs: one interface, and the JetStream object store or S3 (R2, MinIO) behind it.

    store = objects(app)                      # JetStream, or what OBJECTS_URL says
    await store.put("images/cat.png", data)
    data = await store.get("images/cat.png")

A message carries a name, the store carries the bytes. `OBJECTS_URL` is empty for JetStream (nothing
else to run; what is stored is kept for 30 days), `memory:` for tests, or
`s3://BUCKET?endpoint=https://…&region=auto` with `OBJECTS_KEY` and `OBJECTS_SECRET`.

Guaranteed: what was put before `put` returned is what `get` gives, and putting the same again is
harmless, so a run may be repeated. `get` raises `NotFound` for a name that is not there.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import urllib.error
import urllib.request
from datetime import UTC, datetime
from typing import Protocol
from urllib.parse import parse_qs, quote, urlsplit

from holdfast.app import Holdfast
from holdfast.client import Client
from holdfast.errors import ConfigError, NotFound, Unavailable

TIMEOUT_SECONDS = 60.0


class ObjectStore(Protocol):
    """Where bytes are kept under names."""

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name, instead of what was there."""
        ...

    async def get(self, name: str) -> bytes:
        """What was stored."""
        ...


class MemoryObjects:
    """For tests."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        self.kept[name] = body

    async def get(self, name: str) -> bytes:
        """What was stored."""
        if name not in self.kept:
            raise NotFound(f"object {name} is not there")
        return self.kept[name]


class JetstreamObjects:
    """The object store of the app's own namespace."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app

    async def _client(self) -> Client:
        backend = await self._app.backend()
        if not isinstance(backend, Client):
            raise ConfigError("objects are on NATS, and this app is in memory: OBJECTS_URL=memory:")
        return backend

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        await (await self._client()).objects.put(f"files/{name}", body)

    async def get(self, name: str) -> bytes:
        """What was stored."""
        return await (await self._client()).objects.get(f"files/{name}")


class S3Objects:
    """A bucket of S3, R2, MinIO or anything that speaks their protocol."""

    def __init__(
        self, bucket: str, endpoint: str, key: str, secret: str, *, region: str = "auto"
    ) -> None:
        if urlsplit(endpoint).scheme not in ("http", "https") or not (bucket and key and secret):
            raise ConfigError(
                "S3 needs a bucket, an endpoint such as https://s3.eu-west-1.amazonaws.com, "
                "OBJECTS_KEY and OBJECTS_SECRET"
            )
        self._bucket = bucket
        self._endpoint = endpoint.rstrip("/")
        self._keys = (key, secret)
        self._region = region

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        await asyncio.to_thread(self._send, "PUT", name, body)

    async def get(self, name: str) -> bytes:
        """What was stored."""
        return await asyncio.to_thread(self._send, "GET", name, b"")

    def _send(self, method: str, name: str, body: bytes) -> bytes:
        url = f"{self._endpoint}/{self._bucket}/{quote(name)}"
        now = datetime.now(UTC)
        headers = sign(method, url, body, *self._keys, region=self._region, now=now)
        request = urllib.request.Request(
            url, data=body if method == "PUT" else None, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise NotFound(f"object {name} is not there") from None
            raise Unavailable(f"object {name}: the store answered {error.code}") from None
        except OSError as error:
            raise Unavailable(f"object {name}: the store cannot be reached: {error}") from None


def sign(
    method: str, url: str, body: bytes, key: str, secret: str, *, region: str, now: datetime
) -> dict[str, str]:
    """The headers that AWS Signature Version 4 asks for, for a request without a query."""
    parts = urlsplit(url)
    moment, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    signed = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": moment}
    names = ";".join(signed)
    lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
    request = "\n".join((method, parts.path, "", lines, names, digest))
    scope = f"{day}/{region}/s3/aws4_request"
    hashed = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(("AWS4-HMAC-SHA256", moment, scope, hashed))
    chain = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        chain = hmac.digest(chain, part.encode(), "sha256")
    signature = hmac.digest(chain, text.encode(), "sha256").hex()
    given = f"Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {
        "Authorization": f"AWS4-HMAC-SHA256 {given}",
        "x-amz-content-sha256": digest,
        "x-amz-date": moment,
    }


def objects(app: Holdfast, url: str | None = None) -> ObjectStore:
    """The store that `OBJECTS_URL`, or `url`, names; the JetStream object store without one."""
    text = os.environ.get("OBJECTS_URL", "") if url is None else url
    parts = urlsplit(text)
    if not text:
        return JetstreamObjects(app)
    if parts.scheme == "memory":
        return MemoryObjects()
    if parts.scheme != "s3":
        raise ConfigError(f"OBJECTS_URL {text!r} is not s3://BUCKET?endpoint=https://…, or empty")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return S3Objects(
        parts.netloc,
        query.get("endpoint", "https://s3.amazonaws.com"),
        os.environ.get("OBJECTS_KEY", ""),
        os.environ.get("OBJECTS_SECRET", ""),
        region=query.get("region", "auto"),
    )

"""Files between jobs: one interface, with the JetStream object store or S3 (R2, MinIO) behind it.

    store = objects(app)                      # JetStream, or what OBJECTS_URL says
    await store.put("images/cat.png", data)
    data = await store.get("images/cat.png")

A message carries a name, the store carries the bytes. `OBJECTS_URL` is empty for JetStream (nothing
else to run; objects are kept for 30 days), `memory:` for tests, or
`s3://BUCKET/PREFIX?endpoint=https://…&region=auto` with `OBJECTS_KEY` and `OBJECTS_SECRET`, which
needs `pip install 'holdfast-jobs[s3]'`.

Guaranteed: `get` returns what was stored when `put` returned, and storing the same again is
harmless, so a run may be repeated. `get` raises `NotFound` for an unknown name.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import parse_qs, urlsplit

from holdfast.app import Holdfast
from holdfast.client import Client
from holdfast.errors import ConfigError, NotFound, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Store

TIMEOUT: Final = timedelta(seconds=60)
"""Timeout of a request: enough for a file of 100 MB over a slow line."""
RETRY_TIMEOUT: Final = timedelta(seconds=10)
"""How long a failed request is retried before the run fails; then the run's own policy applies."""


class ObjectStore(Protocol):
    """A store of bytes by name."""

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name, replacing earlier ones."""
        ...

    async def get(self, name: str) -> bytes:
        """Read bytes by name."""
        ...


class MemoryObjects:
    """For tests."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        self.kept[name] = body

    async def get(self, name: str) -> bytes:
        """Read bytes by name."""
        if name not in self.kept:
            raise NotFound(f"object {name} does not exist")
        return self.kept[name]


class JetstreamObjects:
    """The object store of the app's namespace."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app

    async def _client(self) -> Client:
        backend = await self._app.backend()
        if not isinstance(backend, Client):
            raise ConfigError("this app runs in memory, without NATS: set OBJECTS_URL=memory:")
        return backend

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        await (await self._client()).objects.put(f"files/{name}", body)

    async def get(self, name: str) -> bytes:
        """Read bytes by name."""
        return await (await self._client()).objects.get(f"files/{name}")


def s3_store(
    bucket: str, endpoint: str, key: str, secret: str, *, region: str = "auto", prefix: str = ""
) -> S3Store:
    """A connection to a bucket, or to a prefix in it."""
    scheme = urlsplit(endpoint).scheme
    if scheme not in ("http", "https") or not (bucket and key and secret):
        raise ConfigError(
            "S3 needs a bucket, an endpoint such as https://s3.eu-west-1.amazonaws.com, "
            "OBJECTS_KEY and OBJECTS_SECRET"
        )
    try:
        from obstore.store import S3Store
    except ImportError as missing:
        raise ConfigError("S3 needs obstore: pip install 'holdfast-jobs[s3]'") from missing
    return S3Store(
        bucket,
        prefix=prefix or None,
        endpoint=endpoint.rstrip("/"),
        access_key_id=key,
        secret_access_key=secret,
        region=region,
        virtual_hosted_style_request=False,
        client_options={"allow_http": scheme == "http", "timeout": TIMEOUT},
        retry_config={"max_retries": 3, "retry_timeout": RETRY_TIMEOUT},
    )


def s3_place(url: str) -> dict[str, str]:
    """The arguments of `s3_store`, from `s3://BUCKET/PREFIX?endpoint=…&region=…` and the
    environment."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    return {
        "bucket": parts.netloc,
        "endpoint": query.get("endpoint", "https://s3.amazonaws.com"),
        "key": os.environ.get("OBJECTS_KEY", ""),
        "secret": os.environ.get("OBJECTS_SECRET", ""),
        "region": query.get("region", "auto"),
        "prefix": parts.path.strip("/"),
    }


class S3Objects:
    """A bucket of S3, R2, MinIO or any other store with the S3 protocol."""

    def __init__(
        self,
        bucket: str,
        endpoint: str,
        key: str,
        secret: str,
        *,
        region: str = "auto",
        prefix: str = "",
    ) -> None:
        self._store = s3_store(bucket, endpoint, key, secret, region=region, prefix=prefix)

    async def put(self, name: str, body: bytes) -> None:
        """Store bytes under a name."""
        from obstore.exceptions import BaseError

        try:
            # One request, which every such store accepts up to 5 GB.
            await self._store.put_async(name, body, use_multipart=False)
        except (BaseError, OSError) as error:
            raise Unavailable(f"object {name} could not be stored: {error}") from None

    async def get(self, name: str) -> bytes:
        """Read bytes by name."""
        from obstore.exceptions import BaseError

        try:
            found = await self._store.get_async(name)
            return bytes(await found.bytes_async())
        except FileNotFoundError:
            raise NotFound(f"object {name} does not exist") from None
        except (BaseError, OSError) as error:
            raise Unavailable(f"object {name} could not be read: {error}") from None


def objects(app: Holdfast, url: str | None = None) -> ObjectStore:
    """The store that `url` or `OBJECTS_URL` names; by default the JetStream object store."""
    text = os.environ.get("OBJECTS_URL", "") if url is None else url
    parts = urlsplit(text)
    if not text:
        return JetstreamObjects(app)
    if parts.scheme == "memory":
        return MemoryObjects()
    if parts.scheme != "s3":
        raise ConfigError(
            f"OBJECTS_URL {text!r} must be s3://BUCKET?endpoint=https://…, memory: or empty"
        )
    return S3Objects(**s3_place(text))

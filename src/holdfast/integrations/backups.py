"""Backups in an object store: S3, R2, MinIO.

    PREFIX/20261118T031700Z/<stream>/backup.json, stream.tar.s2
    PREFIX/20261118T031700Z/complete.json       written last

An address ends with the prefix, meaning the newest backup, or with the name of a backup.

Guaranteed: a backup without its last file is never restored and never counts as kept. Old backups
are deleted only after a newer one is complete. Access: `OBJECTS_KEY` and `OBJECTS_SECRET`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from holdfast.errors import ConfigError, NotFound, Unavailable

if TYPE_CHECKING:
    from obstore.store import S3Store

SCHEME: Final = "s3://"
COMPLETE: Final = "complete.json"
NAME: Final = "%Y%m%dT%H%M%SZ"


class BackupStore:
    """The backups below one place."""

    def __init__(self, url: str) -> None:
        from holdfast.integrations.objects import s3_place, s3_store

        place = s3_place(url)
        above, _, last = place["prefix"].rpartition("/")
        self._chosen = last if _is_name(last) else ""
        place["prefix"] = above if self._chosen else place["prefix"]
        self._store: S3Store = s3_store(**place)
        self._url = url

    def upload(self, folder: Path, streams: dict[str, int]) -> str:
        """Upload a complete folder; returns the backup's name."""
        name = datetime.now(UTC).strftime(NAME)
        with self._reported():
            for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                self._store.put(f"{name}/{path.relative_to(folder).as_posix()}", path)
            self._store.put(f"{name}/{COMPLETE}", msgspec.json.encode({"streams": streams}))
        return name

    def download(self, folder: Path) -> str:
        """Download the backup that the address names, or the newest; returns its name."""
        with self._reported():
            files = self._files()
            complete = [n for n in self._complete(files) if self._chosen in ("", n)]
            if not complete:
                raise NotFound(f"{self._place} has no complete backup")
            for path in files[complete[-1]]:
                target = folder / path
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                with target.open("wb") as file:
                    for chunk in self._store.get(f"{complete[-1]}/{path}").stream():
                        file.write(chunk)
            return complete[-1]

    def keep(self, count: int) -> list[str]:
        """Delete all complete backups but the newest, and unfinished ones that are older than
        those."""
        with self._reported():
            files = self._files()
            kept = self._complete(files)[-count:]
            old = [name for name in sorted(files) if name not in kept and name < kept[-1]]
            for name in old:
                self._store.delete([f"{name}/{path}" for path in _last_first(files[name])])
            return old

    @property
    def _place(self) -> str:
        return self._url.partition("?")[0]

    def _files(self) -> dict[str, list[str]]:
        """The files of each backup."""
        found: dict[str, list[str]] = {}
        for page in self._store.list():
            for one in page:
                name, _, path = str(one["path"]).partition("/")
                if path and _is_name(name):
                    found.setdefault(name, []).append(path)
        return found

    @staticmethod
    def _complete(files: dict[str, list[str]]) -> list[str]:
        return sorted(name for name, paths in files.items() if COMPLETE in paths)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:
            raise Unavailable(f"{self._place} cannot be used: {error}") from None


def _is_name(text: str) -> bool:
    try:
        datetime.strptime(text, NAME).replace(tzinfo=UTC)
    except ValueError:
        return False
    return True


def _last_first(paths: Iterable[str]) -> list[str]:
    """Delete the mark of completeness first: half a backup must not look complete."""
    return sorted(paths, key=lambda path: path != COMPLETE)


def check_place(text: str) -> None:
    """Refuse an address that is not one of ours."""
    if "://" in text and not text.startswith(SCHEME):
        raise ConfigError(f"{text!r} must be a folder, or s3://BUCKET/PREFIX?endpoint=https://…")

"""Files that hold secrets: written atomically, for their owner only.

Guaranteed: a file is never seen half written, and is 0600 unless the caller asks for another mode;
one that others can read is rejected with the fix. It replaces an existing file only on request.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from holdfast.errors import ConfigError


def read_private(path: Path, what: str, missing: str = "") -> bytes:
    """Read a file that only its owner can read; `missing` is the advice if it does not exist."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            mode = stat.S_IMODE(found.st_mode)
            if mode & (0o037 if _mounted(found) else 0o077):
                raise ConfigError(
                    f"{what} {str(path)!r} may be read by others (mode {mode:04o}): "
                    f"run 'chmod 600 {path}', and renew it if it may have been read"
                )
            return file.read()
    except OSError as error:
        todo = f". {missing}" if missing and isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}{todo}") from None


def _mounted(found: os.stat_result) -> bool:
    """Whether root shares the file with our group, as Kubernetes does with mounted secrets."""
    return (
        found.st_uid == 0 and os.geteuid() != 0 and found.st_gid in (os.getegid(), *os.getgroups())
    )


def write_private(
    path: Path, content: bytes, what: str, *, replace: bool, mode: int = 0o600
) -> None:
    """Write a file for its owner only; replaces an existing one only with `replace`."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write(fresh, content, mode)
        try:
            if replace:
                fresh.replace(path)
            else:
                path.hardlink_to(fresh)  # unlike a rename, fails if the name is taken
        finally:
            fresh.unlink(missing_ok=True)
        _sync_folder(path.parent)
    except FileExistsError:
        raise ConfigError(
            f"{what} {str(path)!r} exists and is not overwritten: everything made with it would "
            "become useless. Move it away first, or give another path"
        ) from None
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be written: {error.strerror}") from None


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, mode)  # regardless of the umask
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Builds a wheel of the running Holdfast from its installed files.

Needs neither an index nor a build tool, and works for an editable installation too. The same files
give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.version import DISTRIBUTION, __version__

PACKAGE = Path(__file__).parents[1]
_STEM = f"{DISTRIBUTION.replace('-', '_')}-{__version__}"
WHEEL = f"{_STEM}-py3-none-any.whl"
METADATA = f"{_STEM}.dist-info"
LEFT_OUT = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Written by the installer; RECORD is written again for the new wheel."""


def own_wheel() -> bytes:
    """The wheel; its name is `WHEEL`."""
    files = {**_metadata(), **_package()}
    record = f"{METADATA}/RECORD"
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _metadata() -> dict[str, bytes]:
    """The metadata, and files that only an installation has (the demo's app)."""
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"{DISTRIBUTION} is not installed here as a package, so no wheel of it can be made: "
            "install it, or pass --install-from index"
        ) from None
    wanted = [
        path
        for path in found.files or ()
        if path.parts[0] in (METADATA, PACKAGE.name)
        and path.name not in LEFT_OUT
        and path.suffix != ".pyc"
    ]
    return {path.as_posix(): Path(str(path.locate())).read_bytes() for path in sorted(wanted)}


def _package() -> dict[str, bytes]:
    return {
        path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes()
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")

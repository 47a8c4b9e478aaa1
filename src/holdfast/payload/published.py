"""What workers publish about a job's payload, and the check of a payload against it.

A worker writes the parameters of each job, with their JSON Schemas, into the labels of the job's
consumer. Senders without the app's code (`holdfast enqueue`, the API) check a payload against them
before they send it (`holdfast.payload.misfit`), and the web service learns which parameters are
secret, what a form needs, and what the job promises.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any, Final

import msgspec

from holdfast.errors import Unreadable
from holdfast.model.codec import Codec
from holdfast.model.job import JobSpec
from holdfast.payload.keys import KeyRule
from holdfast.payload.signature import Signature
from holdfast.payload.values import pydantic_extras, read_by_pydantic
from holdfast.redaction import is_secret

LABEL: Final = "holdfast-payload"
"""The label of a consumer."""
LARGEST: Final = 16_000
"""Bytes of a label; larger schemas are left out. The server allows 128 kB for all labels."""


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters of one job."""

    parameters: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    rest: bool = False
    """It takes members of any name (`**kwargs`)."""
    schemas: dict[str, Any] = {}
    """JSON Schemas by parameter; a parameter without one accepts anything."""
    types: dict[str, Any] = {}
    """Schemas that these refer to."""
    key: str = ""
    """How the job computes its key: the path to a text or whole number, or `*` if only the job
    can."""
    lax: tuple[str, ...] = ()
    """Parameters of pydantic types, which convert texts to numbers and the like."""
    plain: tuple[str, ...] = ()
    """Those of them that accept nothing else: they have no validators before pydantic's and no
    aliases."""
    defaults: dict[str, Any] = {}
    """Defaults by parameter, as far as they are JSON and not secret."""
    options: dict[str, str] = {}
    """What the job promises, for people: `retry`, `timeout` and so on."""


PUBLISHED: Final = Codec[Published](Published, "a job's parameters")


def published(signature: Signature, key: KeyRule | None = None, spec: JobSpec | None = None) -> str:
    """The label for a job."""
    rest = signature.rest
    named = tuple(name for name in signature.parameters if name != rest)
    required = tuple(name for name in named if name in signature.required)
    schemas: dict[str, Any] = {}
    types: dict[str, Any] = {}
    lax, plain = [], []
    for name in named:
        annotation = signature.types[name]
        if annotation is inspect.Parameter.empty:
            continue
        if read_by_pydantic(annotation):
            lax.append(name)
            if not pydantic_extras(annotation)[0]:
                plain.append(name)
        if found := _schema(annotation):
            schemas[name] = found[0]
            types |= found[1]
    rule = key.published if key else ""
    options = spec.describe() if spec else {}
    defaults = {n: v for n in named if (v := _default(signature, n)) is not msgspec.UNSET}
    small = Published(named, required, bool(rest), key=rule, options=options)
    whole = msgspec.structs.replace(
        small,
        schemas=schemas,
        types=types,
        lax=tuple(lax),
        plain=tuple(plain),
        defaults=defaults,
    )
    text = _encode(whole)
    return text if len(text) <= LARGEST else _encode(small)


def _default(signature: Signature, name: str) -> Any:
    """A parameter's default as it would be in a payload; `UNSET` if it is not to be shown."""
    if name not in signature.defaults or is_secret(name):
        return msgspec.UNSET
    try:
        return json.loads(msgspec.json.encode(signature.defaults[name]))
    except Exception:  # noqa: BLE001 - a user's type may do anything; without a default it is not shown
        return msgspec.UNSET


def _encode(record: Published) -> str:
    return PUBLISHED.encode(record).decode()


def _schema(annotation: Any) -> tuple[Any, dict[str, Any]] | None:
    try:
        if read_by_pydantic(annotation):
            adapter = sys.modules["pydantic"].TypeAdapter(annotation)
            whole = adapter.json_schema()
            return whole, whole.pop("$defs", {})
        (found,), types = msgspec.json.schema_components([annotation])
        return found, types
    except Exception:  # noqa: BLE001 - a user's type may do anything; without a schema it is not checked
        return None


def read_label(text: str | None) -> Published | None:
    """What a label says; None if there is none that can be read."""
    try:
        return PUBLISHED.decode(text.encode()) if text else None
    except Unreadable:
        return None


def key_in(job: Published, body: bytes) -> str:
    """The key that the job computes from a payload; empty if only the job can compute it."""
    path = job.key.split(".")
    try:
        value = json.loads(body)
        if _is_bare(job, value) and path[0] == job.parameters[0]:
            path = path[1:]
        for name in path:
            value = value[name]
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return ""
    # "007" is 7 for a worker that wants a number.
    return "" if isinstance(value, str) and _wants_number(job) else str(value)


def _wants_number(job: Published) -> bool:
    parameter, *members = job.key.split(".")
    schema = resolved(job.schemas.get(parameter), job.types)
    for name in members:
        schema = resolved(schema.get("properties", {}).get(name), job.types)
    return schema.get("type") == "integer"


def resolved(schema: Any, types: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that it refers to; empty if it takes anything."""
    if not isinstance(schema, dict):
        return {}
    ref = schema.get("$ref")
    found = types.get(str(ref).rpartition("/")[2]) if ref else schema
    return found if isinstance(found, dict) else {}


def _is_bare(job: Published, value: Any) -> bool:
    """Whether a body is the bare value of the first parameter."""
    if len(job.parameters) == 1:
        return not (isinstance(value, dict) and job.parameters[0] in value)
    return not isinstance(value, dict) and set(job.required) <= set(job.parameters[:1])


# ---- a payload to start from

_SAMPLES: Final = {"integer": 0, "number": 0, "boolean": False, "array": [], "null": None}
_DEEPEST: Final = 5
"""Levels of objects that a sample fills in; types may contain themselves."""


def sample(job: Published, text: str = "") -> Any:
    """A payload with each required member; `text` stands for texts. `UNSET` if none is required."""
    values = {n: _filled(job.schemas.get(n), job.types, text, _DEEPEST) for n in job.required}
    if not values:
        return msgspec.UNSET
    return values[job.required[0]] if len(job.parameters) == 1 and not job.rest else values


def _filled(schema: Any, types: dict[str, Any], text: str, deep: int) -> Any:
    if not isinstance(schema, dict) or not deep:
        return None
    if ref := schema.get("$ref"):
        return _filled(types.get(str(ref).rpartition("/")[2]), types, text, deep - 1)
    if "default" in schema or schema.get("enum"):
        return schema.get("default", next(iter(schema.get("enum", ())), None))
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _filled(options[0], types, text, deep)
    kind, known = schema.get("type"), schema.get("properties") or {}
    if kind == "object":
        names = schema.get("required", ())
        return {name: _filled(known.get(name), types, text, deep - 1) for name in names}
    return text if kind == "string" else _SAMPLES.get(kind) if isinstance(kind, str) else None

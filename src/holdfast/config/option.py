"""An option: one field of a role, and the values it accepts.

Guaranteed: a value that `checked` returned has its type and is within its limits. A `RoleConfig`
checks all its fields at construction. An invalid value raises a `ConfigError` that names its source
and what is allowed. Secrets, and logins inside URLs, are never shown.

Not here: where values come from (`loading`), and which roles exist (`roles`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, ClassVar, TypeVar

from holdfast import durations
from holdfast.errors import ConfigError, InvalidInput

C = TypeVar("C")


def option(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> Any:
    """A field of a role: its default and accepted values. The string below it in the source
    documents it."""
    facts = {"least": least, "most": most, "choices": choices, "secret": secret}
    return field(default=default, metadata=facts)


class RoleConfig:
    """What all roles share: checks at construction, and a `repr` without secrets."""

    table: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for spec in options(type(self)):
            value = checked(spec, getattr(self, spec.name), f"{self.table}.{spec.name}")
            object.__setattr__(self, spec.name, value)
        self._check_relations()

    def _check_relations(self) -> None:
        """Raise `ConfigError` if values that are valid alone cannot work together."""

    def __repr__(self) -> str:
        given = (f"{s.name}={shown(s, getattr(self, s.name))}" for s in options(type(self)))
        return f"{type(self).__name__}({', '.join(given)})"


def options(role: type[RoleConfig]) -> tuple[Field[Any], ...]:
    """The fields of a role: its own in order, then those shared with other roles."""
    every = fields(role)  # type: ignore[arg-type]  # every subclass is a dataclass
    own = inspect.get_annotations(role)
    return tuple(sorted(every, key=lambda spec: spec.name not in own))


def variable(role: type[RoleConfig], name: str) -> str:
    """The environment variable of a field; connection variables omit the role."""
    prefix = "" if role.table == "connection" else f"{role.table}_"
    return f"HOLDFAST_{prefix}{name}".upper()


# -- checking ----------------------------------------------------------------------------------


def checked(spec: Field[Any], value: Any, where: str) -> Any:
    """The value with the right type and within its limits, or a `ConfigError` with its source."""
    kind = str(spec.type)
    if kind == "str":
        return _checked_text(spec, value, where)
    number = _number(value, spec.name.endswith("_seconds"), where)
    if kind == "int" and number is not None and number.is_integer():
        number = int(number)
    if number is None or (kind == "int" and isinstance(number, float)):
        raise ConfigError(f"{where} must be {_kind_text(spec)}, not {shown(spec, value)}")
    least, most = spec.metadata["least"], spec.metadata["most"]
    if (least is not None and number < least) or (most is not None and number > most):
        raise ConfigError(f"{where} must be {limits_text(spec)}, not {shown(spec, value)}")
    return number


def _checked_text(spec: Field[Any], value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a text, not a {type(value).__name__}")
    choices = spec.metadata["choices"]
    if choices and value not in choices:
        raise ConfigError(f"{where} must be {limits_text(spec)}, not {value!r}")
    return value


def _number(value: Any, is_duration: bool, where: str) -> float | None:
    if is_duration and isinstance(value, str):
        return checked_by(durations.seconds, value, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) > 2**53:
        return None
    return float(value) if math.isfinite(value) else None


def checked_by(check: Callable[..., C], *args: Any) -> C:
    """Call another module's check; converts its error to `ConfigError`."""
    try:
        return check(*args)
    except InvalidInput as error:
        raise ConfigError(str(error)) from None


# -- texts -------------------------------------------------------------------------------------


def shown(spec: Field[Any], value: Any) -> str:
    """A value that is safe to print."""
    if spec.metadata["secret"]:
        return "'***'" if value else "''"
    if spec.name == "nats_url" and isinstance(value, str):
        return repr(",".join(_without_login(url) for url in value.split(",")))
    return repr(value)


def _without_login(url: str) -> str:
    before, at, host = url.rpartition("@")
    scheme, slashes, _ = before.rpartition("://") if "://" in before else ("", "", "")
    return f"{scheme}{slashes}***@{host}" if at else url


def limits_text(spec: Field[Any]) -> str:
    """The values an option accepts, in words."""
    if spec.metadata["choices"]:
        return " or ".join(f"`{choice}`" for choice in spec.metadata["choices"])
    least, most = spec.metadata["least"], spec.metadata["most"]
    limits = f" of at least {least:,}" if least is not None else ""
    limits += (" and" if limits else "") + f" at most {most:,}" if most is not None else ""
    return _kind_text(spec) + limits


def _kind_text(spec: Field[Any]) -> str:
    return {"int": "a whole number", "float": "a number"}.get(str(spec.type), "a text")

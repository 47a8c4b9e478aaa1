"""Generates `docs/configuration.md`: every option of every role, as the code defines it.

Only the introduction is written by hand, so the page cannot differ from what is checked.
`python -m holdfast.config` prints it.
"""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field
from typing import Any

from holdfast.config.all_roles import ROLES
from holdfast.config.loading import FILE, FILE_VARIABLE
from holdfast.config.option import RoleConfig, limits_text, options, variable

_INTRO = f"""\
# Configuration

<!-- Written by `python -m holdfast.config`; edit src/holdfast/config/roles.py instead. -->

A value comes from the first of these that has it:

1. an explicit argument or command-line flag,
2. the environment variable (an empty one counts as not set),
3. the file `{FILE}` in the working directory, or the file that `{FILE_VARIABLE}` names,
4. the default.

Unknown tables and keys in the file are refused, and so are values that cannot work together; the
message says where the value came from. Fields in seconds also take a text such as `"10m"`.
Unknown environment variables are ignored. On Kubernetes, a service called `holdfast-worker-health`
would set `HOLDFAST_WORKER_HEALTH_PORT`: `enableServiceLinks: false` in the pod prevents that.

```toml
[connection]
nats_url = "nats://nats-0:4222,nats://nats-1:4222,nats://nats-2:4222"

[worker]
group = "images"
concurrency = 20
```
"""


def markdown() -> str:
    """The page `docs/configuration.md`."""
    return _INTRO + "".join(_section(name, role) for name, role in ROLES.items())


def _section(name: str, role: type[RoleConfig]) -> str:
    head = f"\n## `[{name}]`\n\n{inspect.getdoc(role)}\n\n"
    head += "| key | environment | default | takes | meaning |\n|---|---|---|---|---|\n"
    docs = documented(role)
    return head + "".join(
        f"| `{spec.name}` | `{variable(role, spec.name)}` | {_default_text(spec)} "
        f"| {limits_text(spec)} | {docs[spec.name]} |\n"
        for spec in options(role)
    )


def documented(role: type[RoleConfig]) -> dict[str, str]:
    """The doc of each field: the string below it in the source."""
    import ast
    import textwrap

    found: dict[str, str] = {}
    for home in (cls for cls in role.__mro__ if issubclass(cls, RoleConfig)):
        body = ast.parse(textwrap.dedent(inspect.getsource(home))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found.setdefault(ast.unparse(field.target), " ".join(text.split()))
    return found


def _default_text(spec: Field[Any]) -> str:
    assert spec.default is not MISSING
    if isinstance(spec.default, str):
        return f"`{spec.default}`" if spec.default else "none"
    return f"`{spec.default:g}`" if isinstance(spec.default, float) else f"`{spec.default}`"

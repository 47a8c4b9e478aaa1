"""Write the pages that the code knows best: configuration, command line and metrics.

`make docs` runs it. Whoever adds a field, a command, an option or a metric documents it where it is
defined, and runs this; a test compares the pages with the code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from holdfast import config
from holdfast.cli import build
from holdfast.telemetry import CATALOGUE, Metric

DOCS = Path(__file__).parents[1] / "docs"
NOTE = "<!-- Written by `make docs`; edit {} instead. -->"
COMMON = ("--nats-url", "--namespace", "--credentials", "--json", "--verbose")
"""Options that every command takes: told once."""


def pages() -> dict[str, Callable[[], str]]:
    """Every generated page, and what makes it."""
    return {"configuration.md": config.markdown, "cli.md": cli_page, "metrics.md": metrics_page}


# ---- the command line


def cli_page() -> str:
    """Every command with its arguments and options."""
    root: Any = typer.main.get_command(build())
    shared = [p for p in root.params if set(p.opts) & set(COMMON)]
    parts = [
        "# Command line",
        NOTE.format("the command in src/holdfast/cli/"),
        "Every command explains itself with `--help`. Exit codes: 0 done; 1 refused or failed, "
        "with one line on standard error; 2 wrong usage; 130 Ctrl-C. A command that has more of "
        "its own says so below.",
        "Every command also takes these, before or after its name:",
        _options(shared),
        "A missing option falls back to the environment, then to `holdfast.toml`, then to a "
        "default: see [configuration](configuration.md).",
    ]
    for path, command in commands(root):
        parts += _command(path, command)
    return "\n\n".join(parts) + "\n"


def commands(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command below the root by its words; a noun comes before its verbs."""
    for name, command in root.commands.items():
        if command.hidden:
            continue
        yield (name,), command
        for verb, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield (name, verb), inner


def options_of(command: Any) -> list[Any]:
    """A command's own visible options, those that all share left out."""
    return [
        p
        for p in command.params
        if p.opts[0].startswith("-") and not p.hidden and not set(p.opts) & {*COMMON, "--help"}
    ]


def arguments_of(command: Any) -> list[Any]:
    """A command's visible arguments."""
    return [p for p in command.params if not p.opts[0].startswith("-") and not p.hidden]


def _command(path: tuple[str, ...], command: Any) -> list[str]:
    title = f"{'#' * (len(path) + 1)} holdfast {' '.join(path)}"
    parts = [title, *_prose(command.help or "")]
    if hasattr(command, "commands") and not options_of(command):
        return parts
    words = [_shown(p) for p in arguments_of(command)]
    parts.append("```text\n" + " ".join(["holdfast", *path, "[OPTIONS]", *words]) + "\n```")
    if arguments := arguments_of(command):
        parts.append(_table("argument", [(_code(_shown(p)), _meaning(p)) for p in arguments]))
    if options := options_of(command):
        parts.append(_options(options))
    return parts


def _prose(text: str) -> list[str]:
    """A docstring's paragraphs, each on one line."""
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _options(options: list[Any]) -> str:
    return _table("option", [(_code(_flags(p)), _meaning(p)) for p in options])


def _flags(option: Any) -> str:
    flags = ", ".join(sorted(option.opts, key=len))
    if option.secondary_opts:
        flags += " / " + ", ".join(option.secondary_opts)
    return flags if option.is_flag else f"{flags} {option.metavar or _kind(option)}"


def _kind(option: Any) -> str:
    kind = option.type.name
    return "N" if kind.startswith(("int", "float")) else "PATH" if kind == "path" else "TEXT"


def _shown(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    many = "..." if argument.multiple or argument.nargs != 1 else ""
    return f"{name}{many}" if argument.required else f"[{name}]{many}"


def _meaning(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    told = default is not None and not isinstance(default, bool) and str(default)
    if told and parameter.show_default:
        text += f" Default: `{default}`."
    return text


def _table(what: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {what} | meaning |", "|---|---|"]
    lines += ["| {} | {} |".format(left, right.replace("|", "\\|")) for left, right in rows]
    return "\n".join(lines)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


# ---- the metrics


def metrics_page() -> str:
    """Every metric of the catalogue."""
    parts = [
        "# Metrics",
        NOTE.format("`CATALOGUE` in src/holdfast/telemetry.py"),
        "A process with a health port serves these at `/metrics` for Prometheus; "
        "`holdfast worker --processes N` serves those of all its processes on one port, with the "
        "label `process` added. "
        "[Operations](operations.md#what-the-metrics-mean) says which of them to watch.",
        "Names are as Prometheus sees them: a counter ends in `_total`, a histogram has `_bucket`, "
        "`_sum` and `_count`.",
        "\n".join(
            ["| metric | kind | labels | meaning |", "|---|---|---|---|", *map(_metric, CATALOGUE)]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def exposed(metric: Metric) -> str:
    """A metric's name as Prometheus sees it."""
    return f"{metric.name}_total" if metric.kind == "counter" else metric.name


def _metric(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    return f"| `{exposed(metric)}` | {metric.kind} | {labels} | {metric.doc} |"


def main() -> None:
    """Write them all; say which have changed."""
    for name, make in pages().items():
        path, text = DOCS / name, make()
        changed = not path.exists() or path.read_text(encoding="utf-8") != text
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"docs/{name}{': changed' if changed else ''}\n")


if __name__ == "__main__":
    main()

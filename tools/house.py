"""Measure the code: `python tools/house.py [COMMIT or DIRECTORY …]` (`make house`).

Prints one column for each tree, so that two commits can be compared. Without arguments it measures
the working tree. Every figure is counted by the same rules for every tree:

* lines and files: `*.py` below `src/holdfast`, as `wc -l` counts, and the same for each package;
* duplicated passages: the longest runs of at least `PASSAGE` statement lines that occur twice;
* class names that exist twice or more, own-line comments, and module constants `*_SECONDS` that
  have neither a comment nor a docstring beside them;
* files on the way of the seven flows: traced in real processes, see `tools/flows.py`;
* test functions, and with `--cases` the cases that pytest collects (working tree only).

It measures and judges nothing: the exit code is 0 unless a tree cannot be read.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flows import trace

ROOT = Path(__file__).parents[1]
PASSAGE = 6
"""Shorter repeats are mostly imports, signatures and closing brackets."""


@dataclass(frozen=True)
class Module:
    """One file of the package, read and parsed once."""

    name: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def package(self) -> str:
        first, _, rest = self.name.partition("/")
        return first if rest else "(top level)"


def modules(root: Path) -> list[Module]:
    """Every module of the package in a tree."""
    package = root / "src" / "holdfast"
    if not package.is_dir():
        sys.exit(f"{root} has no src/holdfast: name a commit or a clone")
    paths = sorted(package.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return [
        Module(str(path.relative_to(package)), text, ast.parse(text))
        for path, text in texts.items()
    ]


def statements(module: Module) -> list[str]:
    """The lines that say something: no docstrings, comments, imports or lone brackets."""
    skipped: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(module.text.splitlines(), 1)
    found = [line.strip() for number, line in lines if number not in skipped]
    return [line for line in found if len(line) > 2 and not line.startswith("#")]


def duplicated(all_modules: list[Module]) -> tuple[int, int]:
    """How many passages repeat an earlier one, and how many lines they have together."""
    first: dict[tuple[str, ...], tuple[int, int]] = {}
    texts = [statements(module) for module in all_modules]
    for number, lines in enumerate(texts):
        for at in range(len(lines) - PASSAGE + 1):
            first.setdefault(tuple(lines[at : at + PASSAGE]), (number, at))
    passages = total = 0
    for number, lines in enumerate(texts):
        at = 0
        while at <= len(lines) - PASSAGE:
            other, begin = first[tuple(lines[at : at + PASSAGE])]
            if (other, begin) == (number, at):
                at += 1
                continue
            length = PASSAGE
            while (
                at + length < len(lines)
                and begin + length < len(texts[other])
                and lines[at + length] == texts[other][begin + length]
            ):
                length += 1
            passages, total, at = passages + 1, total + length, at + length
    return passages, total


def repeated_classes(all_modules: list[Module]) -> int:
    """Names that more than one class has."""
    names = Counter(
        node.name
        for module in all_modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    return sum(count > 1 for count in names.values())


def comment_lines(module: Module) -> set[int]:
    """Lines that hold a comment and nothing else, without rulers and directives."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        text = token.string.lstrip("#").strip()
        alone = token.line.strip().startswith("#")
        directive = text.startswith(("-", "=", "type:", "noqa", "ruff:", "mypy:"))
        if token.type == tokenize.COMMENT and alone and text and not directive:
            found.add(token.start[0])
    return found


def seconds_constants(module: Module) -> Iterator[bool]:
    """For each module constant `*_SECONDS`: whether a reason stands beside it."""
    comments = comment_lines(module)
    lines = module.text.splitlines()
    body = module.tree.body
    for number, node in enumerate(body):
        if isinstance(node, ast.AnnAssign):
            target: ast.expr | None = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        if not (isinstance(target, ast.Name) and target.id.endswith("_SECONDS")):
            continue
        after = body[number + 1] if number + 1 < len(body) else None
        docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        beside = "#" in lines[(node.end_lineno or node.lineno) - 1]
        yield docstring or beside or node.lineno - 1 in comments


def test_functions(root: Path) -> int:
    """Functions `test_…` below `tests`."""
    return sum(
        line.lstrip().startswith(("def test_", "async def test_"))
        for path in (root / "tests").rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    )


def collected_cases() -> int:
    """Cases that pytest collects in the working tree."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(done.stdout.strip().splitlines()[-1].split()[0])


def measure(root: Path, with_flows: bool) -> dict[str, str]:
    """All figures of a tree, by name."""
    found = modules(root)
    packages: defaultdict[str, list[Module]] = defaultdict(list)
    for module in found:
        packages[module.package].append(module)
    passages, repeated = duplicated(found)
    reasons = [reason for module in found for reason in seconds_constants(module)]
    rows = {
        "lines": f"{sum(m.lines for m in found):,}",
        "files": f"{len(found)}",
        "duplicated passages": f"{passages} ({repeated} lines)",
        "class names used twice": f"{repeated_classes(found)}",
        "own-line comments": f"{sum(len(comment_lines(m)) for m in found)}",
        "*_SECONDS without a reason": f"{reasons.count(False)} of {len(reasons)}",
        "test functions": f"{test_functions(root):,}",
    }
    if with_flows:
        for flow, files in trace(root).items():
            rows[f"files on the way: {flow}"] = f"{len(files)}"
    for name, members in sorted(packages.items()):
        rows[f"  {name}"] = f"{sum(m.lines for m in members):,} in {len(members)}"
    return rows


def unpack(tree: str, folder: Path) -> Path:
    """A directory as it is; a commit is unpacked first."""
    if Path(tree).is_dir():
        return Path(tree).resolve()
    command = ["git", "archive", "--format=tar", tree]
    done = subprocess.run(command, cwd=ROOT, capture_output=True)
    if done.returncode:
        sys.exit(f"{tree} is neither a directory nor a commit: {done.stderr.decode().strip()}")
    target = folder / tree.replace("/", "_")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(target, filter="data")
    return target


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", default=[str(ROOT)], help="commits or directories")
    parser.add_argument("--no-flows", action="store_true", help="only read, start no process")
    parser.add_argument("--cases", action="store_true", help="also count collected test cases")
    parser.add_argument("--files", action="store_true", help="name the files of each flow")
    args = parser.parse_args(given)
    out = sys.stdout.write
    with tempfile.TemporaryDirectory(prefix="holdfast-house-") as folder:
        roots = [unpack(tree, Path(folder)) for tree in args.trees]
        if args.files:
            for tree, root in zip(args.trees, roots, strict=True):
                for flow, files in trace(root).items():
                    out(f"{tree} {flow}: {len(files)}\n" + "".join(f"  {f}\n" for f in files))
            return 0
        columns = [measure(root, not args.no_flows) for root in roots]
    if args.cases:
        columns[-1]["test cases"] = f"{collected_cases():,}"
    names = list(dict.fromkeys(name for column in columns for name in column))
    heads = [Path(tree).name if Path(tree).is_dir() else tree for tree in args.trees]
    out(f"{'':40}" + "".join(f"{head:>22}" for head in heads) + "\n")
    for name in names:
        out(f"{name:40}" + "".join(f"{column.get(name, '-'):>22}" for column in columns) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

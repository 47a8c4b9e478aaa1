"""Make the documentation site from docs/, which is written for forges; `make site` runs it.

`stage` writes build/site-src: the pages of docs/ and those beside it, the reference of every public
Python name (from docs/api.md and the docstrings) and of the HTTP API (from its OpenAPI
description). The navigation follows the sections of docs/index.md. mkdocs then builds strictly, and
`check` follows every link of what was built, and refuses a page that loads anything from elsewhere;
`browse` does the same with scripts: it opens the site in Chromium, light and dark, and searches.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.pages import Block, Page  # noqa: E402 - the path comes first

BUILD = ROOT / "build"
STAGED = BUILD / "site-src"
SITE = BUILD / "site"
BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""Pages beside docs/, and their names in the site."""
SOURCE = "https://github.com/holdfast-jobs/holdfast/blob/main"
"""Where files are read that are not pages of the site."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LONGEST_EXAMPLE = 40
MADE_BY = {
    "Bucket": r"app\.bucket\(",
    "FlowEvent": r"await ctx\.event\(",
    "FlowStep": r"current_step\(\)",
    "LogLine": r"run\.logs\(\)",
    "Once": r"app\.once\(",
    "Resource": r"@app\.resource\b",
}
"""How a program gets what it rarely names; an example shows that instead."""
_FENCE = re.compile(r"^( *`{3,})(\w+) +([^\n`]+)$", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s:#]+\.\w+)([)#])")
_MODULE = re.compile(r"^## `(holdfast[\w.]*)`$", re.MULTILINE)
_NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def slug(text: str, separator: str) -> str:
    """A heading's anchor, as the usual forges make it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", separator)


# ---- staging


def stage(target: Path = STAGED) -> None:
    """Write everything that mkdocs reads."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for name, path in BESIDE.items():
        shutil.copy(ROOT / name, target / path)
    favicon = ROOT / "src" / "holdfast" / "web" / "static" / "favicon.svg"
    shutil.copy(favicon, target / "favicon.svg")
    for path in target.rglob("*.md"):
        path.write_text(_for_site(path, target), encoding="utf-8")
    for name, text in reference().items():
        (target / "reference").mkdir(exist_ok=True)
        (target / "reference" / name).write_text(text, encoding="utf-8")


def _for_site(path: Path, target: Path) -> str:
    """A page with fences that mkdocs knows, and links to where its neighbours are in the site."""
    text = _FENCE.sub(_fence, path.read_text(encoding="utf-8"))
    origin = next((ROOT / k for k, v in BESIDE.items() if target / v == path), None)
    before = (origin or ROOT / "docs" / path.relative_to(target)).parent

    def link(match: re.Match[str]) -> str:
        wanted = (before / match[2]).resolve()
        if wanted.parent == ROOT and wanted.name in BESIDE:
            found = target / BESIDE[wanted.name]
        elif wanted == ROOT / "README.md":
            found = target / "index.md"
        elif wanted.is_relative_to(ROOT / "docs"):
            found = target / wanted.relative_to(ROOT / "docs")
        elif wanted.is_relative_to(ROOT) and wanted.is_file():
            return f"{match[1]}{SOURCE}/{wanted.relative_to(ROOT)}{match[3]}"
        else:
            return match[0]
        return match[1] + os.path.relpath(found, path.parent) + match[3]

    return _LINK.sub(link, text)


def _fence(match: re.Match[str]) -> str:
    file = re.search(r"\bfile=(\S+)", match[3])
    return f"{match[1]}{match[2]}" + (f' title="{file[1]}"' if file else "")


# ---- the reference


def public() -> dict[str, list[str]]:
    """The names of docs/api.md, by module."""
    parts = _MODULE.split((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    return {m: _NAME.findall(t) for m, t in zip(parts[1::2], parts[2::2], strict=True)}


def reference() -> dict[str, str]:
    """The pages of the reference that are made of code."""
    pages = {f"{module}.md": _module(module, names) for module, names in public().items()}
    listed = "\n".join(f"- [`{module}`]({module}.md)" for module in public())
    intro = "Every name that you may import, from its docstring. Other modules are internal."
    http = "- [HTTP API](http.md), from its OpenAPI description"
    pages["index.md"] = f"# Python and HTTP\n\n{intro}\n\n{listed}\n\nAlso:\n\n{http}\n"
    return pages | {"http.md": _http()}


def _module(module: str, names: list[str]) -> str:
    path = ROOT / "src" / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))  # Django's cannot be imported by itself
    doc = (ast.get_docstring(tree) or "").partition("\n\n")[0]
    parts = [f"# `{module}`", doc]
    for name in names:
        if module == "holdfast" and name in public()["holdfast.errors"]:
            parts.append(f"## `{name}` {{#holdfast.{name}}}")
            parts.append(
                f"See [`holdfast.errors.{name}`](holdfast.errors.md#holdfast.errors.{name})."
            )
            continue
        # The members of its bases, but for those that every error has.
        inherited = module != "holdfast.errors"
        options = "" if not inherited else "\n    options:\n      inherited_members: true"
        parts += [f"::: {module}.{name}{options}", example(module, name)]
    return "\n\n".join(parts) + "\n"


def example(module: str, name: str) -> str:
    """The shortest block of the documentation that uses a name, or why there is none."""
    if re.search(r"^    \S", _docstring(module, name), re.MULTILINE):
        return "Example: above."
    found = [
        (len(block.text.splitlines()), page, block)
        for page in _pages()
        for block, used in _uses(page)
        if f"{module}.{name}" in used or re.search(MADE_BY.get(name, r"(?!)"), block.text)
    ]
    short = sorted((f for f in found if f[0] <= LONGEST_EXAMPLE), key=lambda f: (f[0], f[1].name))
    if short:
        _, page, block = short[0]
        source = f"../{page.path.relative_to(ROOT / 'docs')}"
        return f"Example, from [{_title(page)}]({source}):\n\n```python\n{block.text}```"
    if module == "holdfast.errors":
        return "No example: Holdfast raises it, and you catch it like any exception."
    sys.exit(f"{module}.{name} has no example: show one in its docstring or in docs/")


@functools.cache
def _uses(page: Page) -> list[tuple[Block, set[str]]]:
    """The blocks of a page that can be parsed, with the public names that each uses.

    A block knows what it imports, and what the blocks before it have imported.
    """
    found, known = [], {}
    for block in page.blocks("python"):
        try:
            tree = ast.parse(block.text)
        except SyntaxError:  # a fragment
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("holdfast."):
                known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        found.append((block, {_path(node, known) for node in ast.walk(tree)}))
    return found


def _path(node: ast.AST, known: Mapping[str, str]) -> str:
    """What a name or attribute stands for; errors by where they are listed."""
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value, known)}.{node.attr}"
    path = known.get(node.id, "") if isinstance(node, ast.Name) else ""
    name = path.removeprefix("holdfast.")
    return f"holdfast.errors.{name}" if name in public()["holdfast.errors"] else path


def _docstring(module: str, name: str) -> str:
    """Of a public name; Django's modules cannot be imported without a project."""
    if ".django." not in module:
        found = getattr(importlib.import_module(module), name)
        documented = inspect.isclass(found) or inspect.isroutine(found)
        return (inspect.getdoc(found) or "") if documented else ""
    if name == "OutboxRow":
        module = module.replace("outbox", "models")
    tree = ast.parse((ROOT / "src" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    defined = {n.name: ast.get_docstring(n) for n in tree.body if isinstance(n, kinds)}
    return defined.get(name) or ""


def _pages() -> list[Page]:
    folders = (ROOT / "docs", ROOT / "docs" / "tutorial")
    return [Page(path) for folder in folders for path in sorted(folder.glob("*.md"))]


def _title(page: Page) -> str:
    return page.text.partition("\n")[0].lstrip("# ")


def _http() -> str:
    """Every route of the HTTP API."""
    from holdfast.web import create_app

    described: dict[str, Any] = create_app(open_to_all=True).openapi()
    parts = [
        "# HTTP API",
        "Every route below `/api/v1`, from the OpenAPI description that the web serves at "
        "`/api/v1/openapi.json`. [The web](../web.md#the-api) explains roles, cursors and errors.",
    ]
    for path, methods in described["paths"].items():
        for method, route in methods.items():
            parts.append(f"## `{method.upper()} {path}`")
            parts += [text for text in (route.get("summary"), route.get("description")) if text]
            if rows := [_parameter(p) for p in route.get("parameters", ())]:
                parts.append("\n".join(["| parameter | in | meaning |", "|---|---|---|", *rows]))
            answers = ", ".join(
                f"{code} {r.get('description', '')}".strip()
                for code, r in route["responses"].items()
            )
            parts.append(f"Answers: {answers}.")
    return "\n\n".join(parts) + "\n"


def _parameter(parameter: dict[str, Any]) -> str:
    told = parameter.get("description") or parameter.get("schema", {}).get("title", "")
    told = " ".join(str(told).split()).replace("|", "\\|")
    return f"| `{parameter['name']}` | {parameter['in']} | {told} |"


# ---- the navigation


def navigation() -> dict[str, list[str]]:
    """The sections of docs/index.md, each with its pages; pages below a page follow it."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    found = {"Start": ["index.md"]}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        linked = [unquote(target) for target in re.findall(r"\]\(([^)#\s:]+\.md)", body)]
        found[title] = []
        for target in linked:
            page = BESIDE.get(Path(target).name) if target.startswith("../") else target
            below = (ROOT / "docs" / target).with_suffix("")
            if Path(target).name == "index.md":
                below = below.parent
            more = sorted(below.glob("*.md")) if below.is_dir() else []
            inside = [str(p.relative_to(ROOT / "docs")) for p in more if p.name != "index.md"]
            known = [p for pages in found.values() for p in pages]
            found[title] += [p for p in [page or target, *inside] if p not in known]
    found.setdefault("Reference", [])
    found["Reference"] += [
        "reference/index.md",
        *(f"reference/{m}.md" for m in public()),
        "reference/http.md",
    ]
    return found


def _configuration() -> str:
    lines = ["nav:"]
    for title, paths in navigation().items():
        lines += [f"  - {title}:"]
        for folder, group in itertools.groupby(paths, _folder):
            if folder:
                lines += [f'      - "{_heading(folder)}":', *(f"          - {p}" for p in group)]
            else:
                lines += [f"      - {path}" for path in group]
    return (ROOT / "mkdocs.yml").read_text(encoding="utf-8") + "\n" + "\n".join(lines) + "\n"


def _folder(path: str) -> str:
    """The folder that a page opens or is in: its pages fold into one entry of the navigation."""
    name = path.removesuffix(".md")
    return name if (ROOT / "docs" / name).is_dir() else str(Path(path).parent).strip(".")


def _heading(folder: str) -> str:
    for page in (f"{folder}.md", f"{folder}/index.md"):
        if (STAGED / page).exists():
            return (STAGED / page).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return folder.replace("-", " ").capitalize()


# ---- checking what was built


class _Links(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(values["href"])


def check(site: Path = SITE) -> int:
    """Follow every link; returns how many."""
    pages = {path: _Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    wrong, followed = [], 0
    for path, page in pages.items():
        where = path.relative_to(site)
        wrong += [f"{where} loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in [*page.links, *page.loaded]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            followed += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                wrong.append(f"{where}: {url} does not exist")
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].ids
            ):
                wrong.append(f"{where}: {url} has no such anchor")
    missing = [f"{m}.{n}" for m, names in public().items() for n in names
               if f"{m}.{n}" not in pages[site / "reference" / f"{m}.html"].ids]  # fmt: skip
    wrong += [f"{name} has no entry" for name in missing]
    if wrong:
        sys.exit("\n".join(wrong))
    return followed


def browse(site: Path = SITE) -> None:
    """Open the pages in a browser, light and dark: search finds, and nothing comes from outside."""
    from playwright.sync_api import Request, sync_playwright

    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"no browser to open the site with: install one of {', '.join(BROWSERS)}")
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as play:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here, outside = f"http://127.0.0.1:{server.server_port}/", []

        def asked(request: Request) -> None:
            if not request.url.startswith((here, "data:", "blob:")):
                outside.append(request.url)

        browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for scheme, shown in (("light", "default"), ("dark", "slate")):
            page = browser.new_context(color_scheme=scheme).new_page()
            page.on("request", asked)
            page.goto(here)
            page.locator(f"body[data-md-color-scheme={shown}]").wait_for()
            page.keyboard.press("/")
            page.keyboard.type("backoff")
            page.locator(".md-search-result__item").first.wait_for()
        browser.close()
        server.shutdown()
    if outside:
        sys.exit("the pages load " + ", ".join(sorted(set(outside))))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Requests are not worth a line."""


def main() -> None:
    """Stage, build, check."""
    stage()
    (BUILD / "mkdocs.yml").write_text(_configuration(), encoding="utf-8")
    command = [
        ROOT / ".venv-site" / "bin" / "python",
        "-W",
        "ignore",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--clean",
        "--quiet",
    ]
    done = subprocess.run([*map(str, command), "-f", str(BUILD / "mkdocs.yml")], cwd=ROOT / "tools")
    if done.returncode:
        sys.exit(done.returncode)
    browse()
    followed, names = check(), sum(map(len, public().values()))
    count = len(list(SITE.rglob("*.html")))
    print(f"build/site: {count} pages, {followed} links followed, {names} public names")


if __name__ == "__main__":
    main()

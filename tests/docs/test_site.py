"""What `make site` builds from: every page has its place, and every public name an entry."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    """`tools/site_tools.py`."""
    spec = importlib.util.spec_from_file_location("site_tools", ROOT / "tools" / "site_tools.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def staged(site: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as mkdocs reads them."""
    target = tmp_path_factory.mktemp("site") / "pages"
    site.stage(target)
    return target


def test_every_page_has_one_place_in_the_navigation(site: ModuleType, staged: Path) -> None:
    """A page that docs/index.md forgets would be found by nobody."""
    placed = [page for pages in site.navigation().values() for page in pages]
    assert len(placed) == len(set(placed))
    assert set(placed) == {str(p.relative_to(staged)) for p in staged.rglob("*.md")}


def test_every_public_name_has_an_entry(site: ModuleType, staged: Path) -> None:
    """With an example that tests run, or the reason why there is none."""
    for module, names in site.public().items():
        text = (staged / "reference" / f"{module}.md").read_text()
        for name in names:
            entry = re.search(
                rf"^(::: {module}\.|## `){name}\b.*?(?=^:::|^## `|\Z)",
                text,
                re.MULTILINE | re.DOTALL,
            )
            assert entry, f"{module}.{name}"
            assert re.search(
                "^(Example: above|Example, from|No example: |See )", entry[0], re.MULTILINE
            ), f"{module}.{name}"


@pytest.mark.parametrize(
    ("name", "shown", "hidden"),
    [
        ("holdfast.integrations.outbox.Relay", "outbox.Relay(app, engine)", "django"),
        ("holdfast.integrations.django.outbox.ordered", "outbox.ordered(", "session"),
        ("holdfast.testing.DeadLetter", "holdfast.testing", "taskiq"),
        ("holdfast.integrations.taskiq.DeadLetter", "integrations.taskiq", "testing"),
        ("holdfast.notices.post", "await post(", "httpx"),
        ("holdfast.notices.letter", "letter(message", "def "),
        ("holdfast.Bucket", "app.bucket(", "Bucket="),
    ],
)
def test_example_uses_the_name_itself(site: ModuleType, name: str, shown: str, hidden: str) -> None:
    """It is found by what a block imports: many modules have a `post`, a `Relay`, an `enqueue`."""
    found = site.example(*name.rsplit(".", 1))
    assert shown in found
    assert hidden not in found


def test_http_reference_has_every_route(staged: Path) -> None:
    """From the OpenAPI description."""
    text = (staged / "reference" / "http.md").read_text()
    assert "## `POST /api/v1/runs`" in text
    assert text.count("\n## `") > 40


def test_links_and_fences_are_those_of_the_site(staged: Path) -> None:
    """Pages beside docs/ are in it; a file's name is the title of its block."""
    assert "](changelog.md)" in (staged / "support.md").read_text()
    assert "](support.md)" in (staged / "security-policy.md").read_text()
    assert '```python title="shop.py"' in (staged / "tutorial" / "1-first-job.md").read_text()


def test_staged_links_lead_somewhere(site: ModuleType, staged: Path) -> None:
    """To a page of the site, or to a file of the repository where that is read."""
    assert f"]({site.SOURCE}/examples/orders.py)" in (staged / "fastapi.md").read_text()
    for path in staged.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s:#`]+)[)#]", _prose(path.read_text())):
            assert (path.parent / target).exists(), f"{path.relative_to(staged)}: {target}"


def _prose(text: str) -> str:
    return re.sub(r"^( *```).*?^\1|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ('<a href="b.html">', "does not exist"),
        ('<a href="#gone">', "no such anchor"),
        ('<script src="https://example.org/x.js">', "loads https://example.org"),
    ],
)
def test_wrong_page_is_refused(site: ModuleType, tmp_path: Path, page: str, words: str) -> None:
    """A dead link, a dead anchor, and anything that is loaded from elsewhere."""
    for module, names in site.public().items():
        path = tmp_path / "reference" / f"{module}.html"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f'<h2 id="{module}.{name}">' for name in names))
    (tmp_path / "a.html").write_text('<h1 id="here"><a href="#here"><a href="https://example.org">')
    assert site.check(tmp_path) == 1
    (tmp_path / "a.html").write_text(page)
    with pytest.raises(SystemExit, match=words):
        site.check(tmp_path)

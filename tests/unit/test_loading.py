"""Finding the user's app: what is wrong with its name is one sentence, its own errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.loading import AppNotLoaded, describe, load_app

GOOD = "from holdfast import Holdfast\n{name} = Holdfast('shop')\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("shop_"):
            del sys.modules[name]


def test_load_app_finds_the_object_in_the_working_directory(folder: Path) -> None:
    """`module:object`, with dots on both sides."""
    (folder / "shop_a").mkdir()
    source = GOOD.format(name="application") + "class inside:\n    app = application\n"
    (folder / "shop_a" / "jobs.py").write_text(source)
    assert load_app("shop_a.jobs:application").name == "shop"
    assert load_app("shop_a.jobs:inside.app").name == "shop"


def test_load_app_without_an_object_is_called_app(folder: Path) -> None:
    """`module` alone means `module:app`; if there is none, the likely one is named."""
    (folder / "shop_b.py").write_text(GOOD.format(name="app"))
    assert load_app("shop_b").name == "shop"
    (folder / "shop_c.py").write_text(GOOD.format(name="application"))
    with pytest.raises(AppNotLoaded, match=r"has no 'app': did you mean shop_c:application\?"):
        load_app("shop_c")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("shop_nowhere:app", "there is no module 'shop_nowhere' in"),
        ("shop_nowhere.jobs:app", "there is no module 'shop_nowhere' in"),
        ("jobs/shop.py:app", "is a file: name the module, jobs.shop:app"),
        ("shop.py", "is a file: name the module, shop:app"),
        ("", "is not of the form module:object"),
        (":app", "is not of the form module:object"),
        ("a-b:app", "is not of the form module:object"),
    ],
)
def test_load_app_says_what_is_wrong_with_the_name(target: str, message: str) -> None:
    """One sentence each, and no traceback."""
    with pytest.raises(AppNotLoaded) as caught:
        load_app(target)
    assert message in str(caught.value)


def test_load_app_refuses_what_is_no_app(folder: Path) -> None:
    """A missing attribute and an object of another kind are told apart."""
    (folder / "shop_d.py").write_text("app = {}\n")
    with pytest.raises(AppNotLoaded, match="shop_d:app is a dict, not a Holdfast app"):
        load_app("shop_d:app")
    with pytest.raises(AppNotLoaded, match="no 'jobs': it does not have a Holdfast app at all"):
        load_app("shop_d:jobs")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import shop_missing", "No module named 'shop_missing'"),
    ],
)
def test_load_app_shows_the_users_own_error(
    folder: Path, capsys: pytest.CaptureFixture[str], source: str, words: str
) -> None:
    """A module that cannot be imported: its traceback, from its first line, without ours."""
    (folder / "shop_e.py").write_text(source)
    with pytest.raises(AppNotLoaded, match="'shop_e' cannot be imported"):
        load_app("shop_e:app")
    shown = capsys.readouterr().err
    assert words in shown
    assert "loading.py" not in shown
    assert "importlib" not in shown
    sys.modules.pop("shop_e", None)


def test_load_app_tells_a_wrong_definition_in_one_line(folder: Path) -> None:
    """What Holdfast itself refuses needs no traceback: the user's line and the reason."""
    source = GOOD.format(name="app") + "@app.job(timeout=-1)\ndef f() -> None: ...\n"
    (folder / "shop_f.py").write_text(source)
    with pytest.raises(AppNotLoaded, match=r"shop_f\.py, line 3: timeout must be"):
        load_app("shop_f:app")


def test_misspelt_option_names_the_line_once(folder: Path) -> None:
    """The sentence has the place already."""
    (folder / "shop_h.py").write_text(
        GOOD.format(name="app") + "@app.job(tmeout=1)\ndef f() -> None: ...\n"
    )
    with pytest.raises(AppNotLoaded, match=r"^\S+shop_h\.py:3: .*did you mean 'timeout'") as caught:
        load_app("shop_h:app")
    assert str(caught.value).count("shop_h.py") == 1


def test_describe_tells_jobs_with_groups_and_parameters(folder: Path) -> None:
    """As much as another process needs to run the app."""
    source = GOOD.format(name="app") + "@app.job(group='g')\ndef f(a: int, b: int) -> None: ...\n"
    (folder / "shop_g.py").write_text(source)
    assert describe(load_app("shop_g:app")) == {
        "name": "shop",
        "jobs": [
            {
                "name": "f",
                "group": "g",
                "parameters": ["a", "b"],
                "sample": '{"a": 0, "b": 0}',
                "on": [],
                "timeout": None,
                "ordered": False,
            }
        ],
        "schedules": [],
    }

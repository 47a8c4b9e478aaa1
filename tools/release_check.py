"""Check what would be published, as it would be installed; `make release-check` runs it.

1. Build the sdist, and the wheel from the sdist; `twine check --strict`; the files in the wheel;
   the changelog is that of the version.
2. Lint workflows, Dockerfiles (also those of a new project) and dependabot's configuration.
3. On every Python that is supported and here: type the README in the unpacked sdist, as in a
   checkout, and the tutorial with only the wheel, as a new user would: with whatever versions the
   index has today. List the licences of the locked ones. The logs are in build/release.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from holdfast.deploy.scaffold import new_project
from holdfast.deploy.wheel import METADATA, WHEEL, own_wheel
from holdfast.version import __version__

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "release"
DIST = OUT / "dist"
TOOLS = ROOT / ".venv-release" / "bin"
LICENCES = ("Apache", "BSD", "ISC", "MIT", "MPL-2.0", "PSF", "Python", "Unlicense")
"""Licences that may be installed with ours. Others need a decision."""
UNNAMED = ("taskiq-dependencies",)
"""Their metadata name no licence; the licence file that they install is MIT's."""


def run(*command: str | Path, env: dict[str, str] | None = None, log: Path | None = None) -> None:
    """A command that has to work; what it prints goes to the log, or is shown if it fails."""
    log = log or OUT / "last.log"
    with log.open("wb") as out:
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, env=os.environ | (env or {}),
            stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{log.read_text()[-4000:]}")


def say(text: str) -> None:
    """A line of the report."""
    print(text, flush=True)


def build() -> Path:
    """The sdist and the wheel, and what is in them."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    run(
        TOOLS / "python",
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        DIST,
        ROOT,
        log=OUT / "build.log",
    )
    run(TOOLS / "twine", "check", "--strict", *DIST.iterdir())
    tracked = subprocess.check_output(["git", "ls-files", "src/holdfast"], cwd=ROOT, text=True)
    wanted = {name.removeprefix("src/") for name in tracked.splitlines()}
    wanted |= {"holdfast/cli/sample/shop.py"}
    with zipfile.ZipFile(DIST / WHEEL) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    if packed != wanted:
        sys.exit(
            f"the wheel has {sorted(packed - wanted)} too much and lacks {sorted(wanted - packed)}"
        )
    with zipfile.ZipFile(DIST / WHEEL) as archive:
        page = archive.read(f"{METADATA}/METADATA").decode()
    if lost := re.findall(r"\]\((?!https?:|#)[^)]+\)|src=\"(?!https?:)[^\"]+\"", page):
        sys.exit(f"the package's page has links that lead nowhere on an index: {lost}")
    (OUT / "own.whl").write_bytes(own_wheel())
    with zipfile.ZipFile(OUT / "own.whl") as archive:
        if set(archive.namelist()) != names:
            sys.exit(f"the wheel of new projects differs: {set(archive.namelist()) ^ names}")
    with tarfile.open(next(DIST.glob("*.tar.gz"))) as source:
        members = source.getnames()
    say(f"{WHEEL}: {len(packed)} files; sdist: {len(members)} files")
    return DIST / WHEEL


def changelog(text: str, version: str) -> str:
    """What is wrong with a changelog: it may open with "Unreleased", then comes the version."""
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    newest = next((title for title in titles if title != "Unreleased"), "")
    if "Unreleased" in titles[1:]:
        return "CHANGELOG.md: the section Unreleased must be the first"
    if not re.fullmatch(rf"{re.escape(version)} – \d{{4}}-\d\d-\d\d", newest):
        return (
            f"CHANGELOG.md: its newest version is {newest!r} and version.py says {version}: "
            f"make them the same, such as '## {version} – YYYY-MM-DD'"
        )
    return ""


def lint() -> None:
    """Workflows, Dockerfiles, dependabot."""
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
    project = OUT / "project"
    new_project("acme", project)
    images = [ROOT / "Dockerfile", *project.rglob("*Dockerfile")]
    # DL3008, DL3013: versions come from locks. SC2046: several wheels are several words.
    run(
        TOOLS / "hadolint",
        *(f"--ignore={rule}" for rule in ("DL3008", "DL3013", "SC2046")),
        *images,
    )
    checked = [*workflows, *project.rglob("ci.yaml")]
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *checked)
    settings = ROOT / ".github" / "dependabot.yml"
    run(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.dependabot", settings)
    run(TOOLS / "zizmor", "--offline", "--quiet", "--min-severity", "medium", *workflows, settings)
    if actionlint := shutil.which("actionlint"):
        run(actionlint, *checked)
    else:
        say("actionlint: not on the PATH, so it was not run; schema and zizmor were")


def pythons() -> dict[str, Path]:
    """Every supported Python of this machine, by version: on the PATH, or pyenv's."""
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = {}
    for minor in re.findall(r":: (3\.\d+)$", "\n".join(metadata["classifiers"]), re.MULTILINE):
        pyenv = sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python3"))
        for path in [*map(Path, filter(None, [shutil.which(f"python{minor}")])), *pyenv]:
            if (
                subprocess.run(
                    [path, "-c", "import venv, ensurepip"], capture_output=True
                ).returncode
                == 0
            ):
                found[minor] = path
                break
        else:
            say(f"Python {minor}: not here, so nothing was tried; the workflow does")
    return found


def typed(minor: str, python: Path) -> None:
    """README and tutorial, typed with only the wheel."""
    shims = OUT / f"python{minor}"
    shims.mkdir()
    (shims / "python3").symlink_to(subprocess.check_output(
        [python, "-c", "import sys; print(sys.executable)"], text=True).strip())  # fmt: skip
    env = {
        "PATH": f"{shims}{os.pathsep}{os.environ['PATH']}",
        "PIP_FIND_LINKS": f"{DIST} {os.environ.get('PIP_FIND_LINKS', '')}".strip(),
    }
    for name, pages in {
        "readme": ["--checkout", next(DIST.glob("*.tar.gz")), ROOT / "README.md"],
        "tutorial": sorted((ROOT / "docs" / "tutorial").glob("[1-9]*.md")),
    }.items():
        log = OUT / f"{name}-{minor}.log"
        run(sys.executable, "tools/typed.py", *pages, env=env, log=log)
        say(f"Python {minor}: {name} works as written ({log.relative_to(ROOT)})")


def licences(python: Path) -> None:
    """What is installed with the wheel, and under which licence."""
    venv = OUT / "installed"
    run(python, "-m", "venv", venv)
    run(
        venv / "bin" / "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "-r",
        ROOT / "locks" / "runtime.txt",
    )
    run(venv / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-index", DIST / WHEEL)
    run(venv / "bin" / "pip", "check")
    allowed = ";".join(LICENCES)
    command = [TOOLS / "pip-licenses", f"--python={venv / 'bin' / 'python'}", "--format=markdown"]
    rules = ["--partial-match", f"--allow-only={allowed}", "--ignore-packages", *UNNAMED]
    run(*command, *rules, log=OUT / "licences.md")
    say(
        f"licences: {len((OUT / 'licences.md').read_text().splitlines()) - 2} packages, all allowed"
    )


def main() -> None:
    """Everything, in order."""
    if wrong := changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__):
        sys.exit(wrong)
    build()
    lint()
    found = pythons()
    licences(next(iter(found.values())))
    for minor, python in found.items():
        typed(minor, python)
    say("everything that would be published has been checked")


if __name__ == "__main__":
    main()

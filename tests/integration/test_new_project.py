"""`holdfast new`: what it makes works as it is, and as its README says."""

from __future__ import annotations

import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from PIL import Image

from holdfast.deploy.scaffold import new_job, new_project
from holdfast.errors import ConfigError
from holdfast.server.process import free_ports
from holdfast.version import __version__

ROOT = Path(__file__).parents[2]
SECONDS = 240


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh project with one more job, made by the command line in an empty directory."""
    folder = tmp_path_factory.mktemp("empty")
    run(folder, sys.executable, "-m", "holdfast", "new", "project", "acme")
    run(folder / "acme", sys.executable, "-m", "holdfast", "new", "job", "invoice")
    return folder / "acme"


@pytest.fixture(scope="module")
def port() -> int:
    """Where its server listens."""
    return free_ports(1)[0]


def variables(port: int = 0) -> dict[str, str]:
    """As somebody has it who has installed Holdfast into the active environment.

    With a port: a reader of the README, who has only Python, and what `make setup` installs.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HOLDFAST_", "PYTEST_"))}
    if port:
        kept |= {"PORT": str(port), "VIRTUAL_ENV": "", "PYTHONPATH": ""}
        return {name: value for name, value in kept.items() if value}
    paths = [str(Path(p).resolve()) for p in sys.path if p and Path(p).is_dir()]
    own = str(Path(sys.executable).parent)
    return kept | {
        "PATH": f"{own}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": sys.prefix,
        "PYTHONPATH": os.pathsep.join(p for p in paths if p != str(ROOT)),
    }


def run(folder: Path, *command: str, port: int = 0) -> str:
    """A command that has to work."""
    done = subprocess.run(
        command, cwd=folder, env=variables(port), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def typed(project: Path) -> list[list[str]]:
    """The lines of each shell block of the README, in order."""
    text = (project / "README.md").read_text()
    return [block.strip().splitlines() for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]


@pytest.fixture
def installed(project: Path, port: int) -> None:
    """The first line of the README: the wheel beside the jobs, in an environment of its own."""
    assert typed(project)[0][0] == "make setup"
    run(project, "make", "setup", port=port)
    paths = "import holdfast, sys; print(holdfast.__file__.startswith(sys.prefix))"
    assert run(project, ".venv/bin/python", "-c", paths, port=port).strip() == "True"


@pytest.fixture
def developing(project: Path, port: int, installed: None) -> Iterator[subprocess.Popen[bytes]]:
    """The last line of the first block, which goes on running."""
    command = typed(project)[0][-1]
    assert command == "make dev"
    log = project / "dev.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command.split(), cwd=project, env=variables(port), stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + SECONDS
    while log.read_text().count("at a time") < 3:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(600)  # a dozen processes, each of which imports everything
def test_quick_start_works_as_typed(
    project: Path, port: int, developing: subprocess.Popen[bytes]
) -> None:
    """Set up, test, develop, and in another terminal a picture through both sample jobs."""
    first, second, *_ = typed(project)
    assert [*first, *second] == ["make setup", "make test", "make dev", "make sample"]
    told = run(project, *first[1].split(), port=port)
    assert told.count(" passed") == 4, "three jobs, and the project itself"
    assert "failed" not in told
    assert "small.png: 200 × 150" in run(project, *second[0].split(), port=port)
    with Image.open(io.BytesIO((project / "small.png").read_bytes())) as image:
        assert image.size == (200, 150)
    os.killpg(developing.pid, signal.SIGINT)  # Ctrl-C
    developing.wait(60)
    deadline = time.monotonic() + 60
    while answers(port):
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        ("wheel", "holdfast-jobs==VERSION"),
        ("index", "holdfast-jobs>=VERSION"),
        ("git+https://example.org/me/holdfast@v9", "holdfast-jobs @ git+https://example.org/me/holdfast@v9"),
        ("holdfast_jobs-9.1-py3-none-any.whl", "holdfast-jobs==9.1"),
    ],
)  # fmt: skip
def test_project_gets_holdfast_from_where_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, requirement: str
) -> None:
    """Jobs, those added later, and the control plane's image all require the same."""
    monkeypatch.chdir(tmp_path)
    Path("holdfast_jobs-9.1-py3-none-any.whl").write_bytes(b"a wheel")
    requirement = requirement.replace("VERSION", __version__)
    new_project("acme", Path("acme"), source)
    new_job("invoice", Path("acme"))
    for path in Path("acme/jobs").glob("*/pyproject.toml"):
        extra = "" if path.parent.name == "invoice" else "[s3]"
        wanted = requirement.replace("holdfast-jobs", f"holdfast-jobs{extra}", 1)
        assert wanted in tomllib.loads(path.read_text())["project"]["dependencies"]
    image = Path("acme/deploy/control.Dockerfile").read_text()
    assert requirement.replace("holdfast-jobs", "holdfast-jobs[web,s3]", 1) in image
    assert ("install --yes --no-install-recommends git" in image) == source.startswith("git+")
    kept = [path.name for path in Path("acme/wheels").glob("*.whl")]
    assert kept == (
        [f"holdfast_jobs-{requirement[15:]}-py3-none-any.whl"] if "==" in requirement else []
    )


@pytest.mark.parametrize("source", ["", "pip", "missing.whl", "other-1.0-py3-none-any.whl"])
def test_source_that_cannot_be_installed_is_refused(tmp_path: Path, source: str) -> None:
    """It says which sources there are, and nothing is written."""
    (tmp_path / "other-1.0-py3-none-any.whl").touch()
    with pytest.raises(ConfigError, match="no source of Holdfast: say 'wheel', 'index'"):
        new_project("acme", tmp_path / "acme", str(tmp_path / source) if "." in source else source)
    assert not (tmp_path / "acme").exists()


def answers(port: int) -> bool:
    """Whether somebody listens."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_new_job_needs_no_other_edit(project: Path) -> None:
    """A directory more: consumers, manifests and their scaling are there."""
    out = project / "deploy" / "rendered"
    run(project, "holdfast", "deploy", "render", "--tag", "old", "--tag", "invoice=abc")
    scaled = yaml.safe_load((out / "jobs" / "invoice" / "scaling.yaml").read_text())
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["metadata"]["url"].endswith("/lag/invoice/invoice")
    workers = next(yaml.safe_load_all((out / "jobs" / "invoice" / "workers.yaml").read_text()))
    [container] = workers["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "ghcr.io/example/acme-invoice:abc"
    assert "terminationGracePeriodSeconds: 315" in (out / "jobs/invoice/workers.yaml").read_text()
    assert "image-resize invoice" in (out / "apply.sh").read_text()


def test_image_has_the_commit_that_last_changed_it(project: Path) -> None:
    """The same tags here and in the pipeline: of its own directory, or of what is shared."""

    def git(*words: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        return run(project, "git", *names, *words).strip()

    def commit(name: str) -> str:
        (project / name).parent.mkdir(exist_ok=True, parents=True)
        with (project / name).open("a") as file:
            file.write("\n")
        git("add", "--all")
        git("commit", "--quiet", "--message", name)
        return git("rev-parse", "HEAD")[:12]

    def tags() -> dict[str, str]:
        words = run(project, sys.executable, "tools/tags.py").split()
        return dict(word.split("=") for word in words)

    git("init", "--quiet")
    start = commit("README.md")
    parts = ["control", "image-download", "image-resize", "invoice"]
    assert tags() == dict.fromkeys(parts, start)
    one = commit("jobs/invoice/main.py")
    commit("docs/more.md")
    assert tags() == dict.fromkeys(parts, start) | {"invoice": one}
    shared = commit("shared/settings.py")
    control = commit("deploy/control.Dockerfile")
    assert tags() == dict.fromkeys(parts, shared) | {"control": control}
    (project / "jobs/invoice/main.py").write_text("changed")
    assert tags()["invoice"] == f"{shared}-dirty"
    git("checkout", "--quiet", "jobs/invoice/main.py")


@pytest.mark.parametrize("environment", ["production", "staging"])
def test_overlay_of_an_environment_is_what_is_checked(project: Path, environment: str) -> None:
    """Render, patch and check as the pipeline does: a patch of the overlay counts."""
    run(project, "make", "check", f"ENVIRONMENT={environment}")
    overlay = project / "deploy" / "overlays" / environment / "kustomization.yaml"
    text = overlay.read_text()
    patch = "patches:\n  - target: {kind: Deployment, name: control}\n    patch: |\n      - "
    patch += "{op: replace, path: /spec/template/spec/containers/0/args/0, value: contrl}\n"
    command = ["holdfast", "deploy", "check", "--environment", environment]
    try:
        overlay.write_text(text + patch)
        done = subprocess.run(command, cwd=project, env=variables(), capture_output=True, text=True)
        assert done.returncode == 1
        assert "'holdfast contrl" in done.stdout
        overlay.write_text(text + "namespace: elsewhere\n")
        done = subprocess.run(command, cwd=project, env=variables(), capture_output=True, text=True)
    finally:
        overlay.write_text(text)
    if environment == "production":
        assert "kubernetes_namespace" in done.stderr


def test_pipeline_has_no_lasting_token_and_skips_no_verification(project: Path) -> None:
    """The cluster takes the identity of the run; every permission is named."""
    text = (project / ".github" / "workflows" / "ci.yaml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["deploy"]["permissions"]["id-token"] == "write"
    assert set(re.findall(r"secrets\.\w+", text)) == set()
    for word in ("insecure", "validate=false", "skip-tls", "--force"):
        assert word not in text
    steps = [step.get("run", "") for step in workflow["jobs"]["deploy"]["steps"]]
    assert any("production/apply.sh" in step for step in steps)
    assert "workflow_dispatch" in text
    used = re.findall(r"uses: \S+@(\S+)", text)
    assert used
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for commit in used)
    commands = re.findall(r"make ([a-z-]+)", " ".join(steps))
    makefile = (project / "Makefile").read_text()
    assert all(f"\n{name}:" in makefile for name in commands)


def test_images_test_before_they_are_made_and_are_not_root(project: Path) -> None:
    """base → test → production: the last needs what only a passing test leaves."""
    for path in project.glob("jobs/*/Dockerfile"):
        text = path.read_text()
        stages = re.findall(r"^FROM \S+ AS (\w+)", text, re.MULTILINE)
        assert stages == ["uv", "base", "test", "production"]
        assert not re.search(r"COPY --from=\S*uv", text), "the installer is not in the image"
        production = text[text.index("AS production") :]
        assert "COPY --from=test /tested" in production
        assert production.index("USER 1000") < production.index("ENTRYPOINT")
        for source in re.findall(r"^COPY (?!--)(\S+)", text, re.MULTILINE):
            assert list(project.glob(source)), f"{path}: {source}"


def test_images_are_locked_to_what_was_tested(project: Path) -> None:
    """Every job has a lock file with all that it needs, and an outdated one is found."""
    run(project, sys.executable, "tools/lock.py")
    locked = (project / "jobs" / "image-resize" / "requirements.txt").read_text()
    for name in ("holdfast-jobs", "nats-py", "obstore", "pillow"):
        assert f"\n{name}=={version(name)}\n" in locked
    assert "pytest" not in locked
    assert "httpx" not in locked
    lock = project / "jobs" / "invoice" / "requirements.txt"
    assert f"\nholdfast-jobs=={__version__}\n" in lock.read_text()
    lock.unlink()
    assert "jobs/invoice" in run(project, sys.executable, "tools/lock.py", "--missing")
    assert lock.exists()


def test_images_are_built_for_both_families_with_a_list_of_contents(project: Path) -> None:
    """What the pipeline calls, and what docker is told then."""
    workflow = (project / ".github" / "workflows" / "ci.yaml").read_text()
    assert "make publish-" in workflow
    for name in ("image-resize", "control"):
        told = run(project, "make", "-n", f"publish-{name}")
        for words in ("linux/amd64,linux/arm64", "--sbom=true", "--provenance", "--cache-to"):
            assert words in told


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A project in a repository, as somebody has it who has just cloned it."""
    folder = tmp_path / "acme"
    new_project("acme", folder)
    commit_all(folder)
    return folder


def commit_all(project: Path) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "a"]):
        run(project, "git", *names, *words)


def make(project: Path, *words: str) -> str:
    """make without an environment: a clone in which nobody has typed `make setup`."""
    done = subprocess.run(
        ["make", "-n", *words], cwd=project, env=variables(1), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("target", ["build-control", "publish-control", "push-image-resize"])
def test_images_have_tags_without_an_environment(fresh: Path, target: str) -> None:
    """The pipeline's builds have no `make setup`: an empty tag is refused by docker."""
    commit = run(fresh, "git", "rev-parse", "HEAD")[:12]
    [image] = re.findall(r"ghcr.io/example/acme-[a-z-]+:(?!cache)\S*", make(fresh, target))
    assert image.endswith(f":{commit}")


def test_commands_of_an_environment_reach_its_namespace(fresh: Path) -> None:
    """`make status ENVIRONMENT=staging` is not about production."""
    for target in ("status", "logs-image-resize", "logs-all", "port-forward-nats"):
        assert "--namespace acme-staging " in make(fresh, target, "ENVIRONMENT=staging")
        assert "--namespace acme " in make(fresh, target)


def test_release_is_the_same_here_and_in_the_pipeline(fresh: Path) -> None:
    """Without one, schedules deployed by hand would be lower than those of the pipeline."""
    assert "--release 1 " in make(fresh, "render")
    (fresh / "README.md").write_text("more")
    commit_all(fresh)
    assert "--release 2 " in make(fresh, "render")
    assert "RELEASE" not in (fresh / ".github" / "workflows" / "ci.yaml").read_text()


def test_pipeline_refuses_lock_files_that_are_not_committed(fresh: Path) -> None:
    """It would tag images as changed that nobody builds."""
    workflow = yaml.safe_load((fresh / ".github" / "workflows" / "ci.yaml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    [check] = [step for step in steps if "porcelain" in step]
    assert steps.index(check) == steps.index("make setup") + 1

    def accepted() -> bool:
        return (
            subprocess.run(["bash", "-ec", check], cwd=fresh, capture_output=True).returncode == 0
        )

    assert accepted()
    (fresh / "jobs" / "image-resize" / "requirements.txt").write_text("pillow==1\n")
    assert not accepted()
    commit_all(fresh)
    assert accepted()


def test_job_may_have_an_environment_of_its_own(project: Path) -> None:
    """Requirements that conflict with another job's are not installed with the others'."""
    job = project / "jobs" / "image-resize"
    (job / ".venv").mkdir()
    try:
        common = run(project, sys.executable, "tools/requirements.py")
        own = run(project, sys.executable, "tools/requirements.py", "image-resize")
    finally:
        (job / ".venv").rmdir()
    assert "Pillow" not in common
    assert "httpx" in common
    assert "Pillow" in own
    assert "httpx" not in own
    assert "jobs/image-resize/.venv" in run(project, "make", "-n", "setup-image-resize")


def test_existing_files_are_never_overwritten(tmp_path: Path) -> None:
    """What is in the way is told, and nothing is written."""
    (tmp_path / "Makefile").write_text("mine")
    with pytest.raises(ConfigError, match="nothing was written"):
        new_project("acme", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["Makefile"]
    (tmp_path / "jobs" / "invoice").mkdir(parents=True)
    with pytest.raises(ConfigError, match="exists already"):
        new_job("invoice", tmp_path)


@pytest.mark.parametrize("name", ["", "Upper", "../up", "a b", "1st", "x" * 60, "trailing-"])
def test_names_that_kubernetes_refuses_are_refused(tmp_path: Path, name: str) -> None:
    """A directory is also the name of an image, a group and a Deployment."""
    with pytest.raises(ConfigError, match="not usable"):
        new_project(name, tmp_path / "x")
    (tmp_path / "jobs").mkdir()
    with pytest.raises(ConfigError, match="not usable"):
        new_job(name, tmp_path)


def test_new_job_outside_a_project_is_refused(tmp_path: Path) -> None:
    """It says what to do instead."""
    with pytest.raises(ConfigError, match="holdfast new project"):
        new_job("invoice", tmp_path)


def test_render_names_the_directory_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A mistake in one job's code is told with its directory and its reason."""
    job = tmp_path / "jobs" / "broken"
    job.mkdir(parents=True)
    (job / "pyproject.toml").write_text("[project]\nname = 'broken'\n")
    (job / "main.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "holdfast", "deploy", "render"]
    done = subprocess.run(command, cwd=tmp_path, env=variables(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "jobs/broken" in done.stderr
    assert "no_such_module" in done.stderr
    (job / "pyproject.toml").write_text("[tool.holdfast]\nmax_replica = 3\n")
    done = subprocess.run(command, cwd=tmp_path, env=variables(), capture_output=True, text=True)
    assert "max_replica is unknown" in done.stderr

"""Type pages of the documentation as a new user would, in an empty directory, and log what happens.

    python tools/typed.py PAGE...        with the `python3` that is first on the PATH
    python tools/typed.py --checkout SDIST PAGE...     in an unpacked sdist instead

A block with `file=NAME` is saved. A line of a `sh` block is typed; what does not return (`holdfast
dev`, `worker`, …) goes on in its own terminal until the next `holdfast dev` or `server`, or the
end. Lines of a block `text output` must appear in what was printed, in any order; `…` stands for
anything, and commands that only look are typed again until it is there. `sh skip` is not typed; in
`sh exit=3` a command may end with that code.

The exit code is 1 when a command failed or a line did not appear.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.pages import Block, Page  # noqa: E402 - the path comes first

GOES_ON = re.compile(r"holdfast (dev|worker|control|coordinator|server|web|demo)\b(?!.*--seconds)")
LOOKS = re.compile(r"holdfast \w+ (list|show|trace)\b")
SECONDS = 90.0
"""Long enough for a busy machine; only something that never comes takes so long."""


class Session:
    """A directory, its environment, and the terminals that are open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
        self.env |= {"PYTHONUNBUFFERED": "1", "COLUMNS": "120", "NO_COLOR": "1"}
        self.env.pop("VIRTUAL_ENV", None)
        self.open: list[subprocess.Popen[bytes]] = []
        self.screen = ""
        self.logs: list[Path] = []
        self.developing = False
        self.looks: list[str] = []

    def follow(self, page: Page) -> None:
        """Do what the page says, block by block."""
        print(f"--- {page.name}", flush=True)
        for block in page.blocks():
            if name := block.word("file"):
                self.save(name, block.text)
            elif block.language == "sh" and "skip" not in block.words:
                self.screen = ""
                self.looks = []
                for line in block.text.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.startswith("#"):
                        self.type(line, int(block.word("exit") or 0))
            elif block.language == "text" and "output" in block.words:
                self.expect(block, page)

    def save(self, name: str, text: str) -> None:
        """Save a file; `holdfast dev` restarts its worker when it is code."""
        log = self.logs[-1] if self.open and self.developing else None
        workers = log.read_text().count("at a time") if log else 0
        (self.folder / name).write_text(text, encoding="utf-8")
        print(f"[{name} saved]", flush=True)
        if log:
            self.wait(lambda: log.read_text().count("at a time") > workers, f"a restart for {name}")

    def type(self, line: str, code: int = 0) -> None:
        """Type one line, and wait for it unless it goes on; `code` is no failure."""
        print(f"$ {line}", flush=True)
        command = f"[ -f .venv/bin/activate ] && . .venv/bin/activate; {line}"
        if LOOKS.match(line) and line not in self.looks:
            self.looks.append(line)
        if not GOES_ON.match(line):
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=self.env, timeout=600,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            shown = [x for x in done.stdout.splitlines() if "is ignored: it is neither" not in x]
            print(*shown, sep="\n", flush=True)
            self.screen += "\n".join(shown) + "\n"
            not_yet = LOOKS.match(line) and done.returncode == 1  # what is expected comes later
            if done.returncode not in (0, code) and not not_yet:
                sys.exit(f"failed: {line}: exit code {done.returncode}\n{self.printed()[-2000:]}")
            return
        if line.startswith(("holdfast dev", "holdfast server")):
            self.close()
            self.developing = line.startswith("holdfast dev")
        log = self.folder / f".terminal-{len(self.logs)}"
        self.logs.append(log)
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folder, env=self.env, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self.open.append(process)
        self.wait(lambda: bool(log.read_bytes()), line)
        if line.startswith(("holdfast dev", "holdfast server")):
            self.wait(lambda: "nats://" in log.read_text(), line)
            address = re.findall(r"nats://[\d.]+:\d+", log.read_text())[0]
            self.env["HOLDFAST_NATS_URL"] = address

    def expect(self, block: Block, page: Page) -> None:
        """Wait until each line of the block was printed."""
        for line in filter(None, block.text.splitlines()):
            pattern = ".*".join(re.escape(part.strip()) for part in line.split("…"))
            self.wait(lambda p=pattern: bool(re.search(p, self.printed())),  # type: ignore[misc]
                      f"{page.name}:{block.line}: {line!r}", again=True)  # fmt: skip
            print(f"  seen: {line}", flush=True)

    def printed(self) -> str:
        """What the last block and the terminals printed."""
        return self.screen + "".join(log.read_text(errors="replace") for log in self.logs)

    def wait(self, condition: object, what: str, *, again: bool = False) -> None:
        """Until something holds."""
        deadline = time.monotonic() + SECONDS
        while not condition():  # type: ignore[operator]
            for line in list(self.looks) if again else ():
                time.sleep(1)
                self.type(line)
            if time.monotonic() > deadline:
                sys.exit(f"not seen: {what}\n{self.printed()[-3000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """Ctrl-C in every open terminal."""
        for process in reversed(self.open):
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                sys.exit(f"did not stop on Ctrl-C: {shlex.join(process.args)}")  # type: ignore[arg-type]
        self.open.clear()


def main() -> None:
    """Follow the pages, one after the other, in one directory."""
    with tempfile.TemporaryDirectory(prefix="holdfast-typed-") as name:
        folder, pages = Path(name), sys.argv[1:]
        if pages[:1] == ["--checkout"]:
            with tarfile.open(pages[1]) as archive:
                archive.extractall(folder, filter="data")
            (folder,), pages = folder.iterdir(), pages[2:]
        session = Session(folder)
        try:
            for page in pages:
                session.follow(Page(Path(page).resolve()))
        finally:
            for log in session.logs:
                print(f"--- {log.name}", log.read_text(errors="replace"), sep="\n", flush=True)
            session.close()
    print("--- everything worked as written")


if __name__ == "__main__":
    main()

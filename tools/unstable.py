"""Run the tests that failed again, alone, and name those that then pass every time.

Called by `.ci/run` after a failed `make test`, with pytest's own record of what failed. Exits 0
only if there are few of them and all of them pass alone. Their first failure stays in the output
above, and the names are the last thing printed: an unstable test is a defect to repair, not noise.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MOST = 2
"""More than two failures in one run have a common cause that a second run would hide."""

TIMES = 3
"""A race that shows often is one that stops the change."""


def main(record: Path) -> int:
    failed = sorted(json.loads(record.read_text()))
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed; only up to {MOST} are run again")
        return 1
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *failed]
    if any(subprocess.run(again).returncode for _ in range(TIMES)):
        print("Failed again, alone:", *failed, sep="\n  ")
        return 1
    print(f"UNSTABLE: failed in the whole run, passed {TIMES} times alone. Repair first:", end="")
    print("", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

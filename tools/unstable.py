"""Run the tests that failed once more, alone, and name those that pass then.

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


def main(record: Path) -> int:
    failed = sorted(json.loads(record.read_text()))
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed; only up to {MOST} are run again alone")
        return 1
    again = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *failed]
    if subprocess.run(again).returncode:
        print("Failed again, alone:", *failed, sep="\n  ")
        return 1
    print("UNSTABLE: failed in the whole run, passed alone. Repair first:", *failed, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

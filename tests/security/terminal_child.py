"""Runs commands one after the other on the terminal it was started on; a line names each."""

from __future__ import annotations

import json
import sys

from holdfast.cli import build
from holdfast.cli.command import run_cli

for words in json.loads(sys.argv[1]):
    sys.stdout.write(f"=== {' '.join(words)!a}\n")
    sys.stdout.flush()
    code = run_cli(build(), words)
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stdout.write(f"=== exit {code}\n")
    sys.stdout.flush()

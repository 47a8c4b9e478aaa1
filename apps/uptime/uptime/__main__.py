"""`python -m uptime`: serve the pages and the API."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal; returns the exit code.

    0 after a signal, 3 when it cannot start (uvicorn's), 78 when the configuration cannot work.
    """
    import uvicorn

    from holdfast import HoldfastError
    from uptime.config import load
    from uptime.web import create_app

    parser = argparse.ArgumentParser(prog="holdfast-uptime", description="Serve the status page.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090)
    given = parser.parse_args(arguments)
    try:
        proxies = load().proxies
        app = create_app(host=given.host)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 78
    try:
        asyncio.run(_connect())
    except HoldfastError as error:
        sys.stderr.write(f"error: {error}\n")
        return 3
    config = uvicorn.Config(
        app,
        host=given.host,
        port=given.port,
        log_level="warning",
        server_header=False,
        proxy_headers=bool(proxies),  # else anyone on this machine could fake any address
        forwarded_allow_ips=proxies or None,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # raised again by the server after shutdown
    uvicorn.Server(config).run()
    return 0


async def _connect() -> None:
    """Check that NATS is reachable: uvicorn would report a failure as a traceback."""
    from uptime.app import app

    async with app:
        pass


if __name__ == "__main__":
    sys.exit(main())

"""The pages and the API as a FastAPI app; any number may run, because all state is in NATS."""

from uptime.web.application import create_app

__all__ = ["create_app"]

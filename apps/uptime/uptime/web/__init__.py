"""The pages and the API, as a FastAPI application; any number may run, for all state is on NATS."""

from uptime.web.application import create_app

__all__ = ["create_app"]

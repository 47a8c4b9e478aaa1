"""Sending runs and asking after them."""

from holdfast.client.client import Client
from holdfast.client.request import Backend, Enqueued, Request
from holdfast.client.run import Run, RunStatus

__all__ = ["Backend", "Client", "Enqueued", "Request", "Run", "RunStatus"]

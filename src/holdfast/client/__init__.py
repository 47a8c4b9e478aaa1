"""Sending runs, and asking what became of them."""

from holdfast.client.client import Client
from holdfast.client.run import Backend, Enqueued, JobRequest, Request, Run, RunStatus

__all__ = ["Backend", "Client", "Enqueued", "JobRequest", "Request", "Run", "RunStatus"]

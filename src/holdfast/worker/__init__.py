"""Workers: pull a group's runs, claim them, execute them, settle them."""

from holdfast.worker.consumer import run_consumer
from holdfast.worker.worker import Worker

__all__ = ["Worker", "run_consumer"]

"""The scheduler: fires every slot that is due, once, whoever dies."""

from holdfast.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]

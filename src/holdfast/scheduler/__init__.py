"""The scheduler: fires every due slot once, even if schedulers die."""

from holdfast.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]

"""Dispatchers: fan commands out to agents and collect their returns."""

from holdfast.dispatcher.dispatcher import Dispatcher

__all__ = ["Dispatcher"]

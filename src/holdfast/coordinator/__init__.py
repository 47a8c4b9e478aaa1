"""Coordinators: judge whether nodes are alive, and give back what lost ones held."""

from holdfast.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]

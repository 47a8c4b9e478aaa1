"""Agents: nodes on hosts that take commands addressed to them, and report facts."""

from holdfast.agent.agent import Agent, Extension
from holdfast.agent.functions import Function, Functions

__all__ = ["Agent", "Extension", "Function", "Functions"]

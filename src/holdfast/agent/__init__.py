"""Agents: nodes on hosts that take commands addressed to them, and report facts."""

from holdfast.agent.agent import Agent, agent_id, state_folder
from holdfast.agent.functions import Function, Functions

__all__ = ["Agent", "Function", "Functions", "agent_id", "state_folder"]

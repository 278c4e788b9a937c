"""Agents that somebody else wrote: a chat endpoint for their clients, and the exact tokens of what they say as rows."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.agents.agent import Agent, AgentTask, CommandAgent
    from rollout.agents.agent_loop import AgentEpisode, agent_columns, run_agents
    from rollout.agents.endpoint import Endpoint

__all__ = ["Agent", "AgentEpisode", "AgentTask", "CommandAgent", "Endpoint", "agent_columns", "run_agents"]

__getattr__ = lazy_names(__name__, ".agent", ".agent_loop", ".endpoint")

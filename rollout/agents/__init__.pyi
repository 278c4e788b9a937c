from .agent import Agent as Agent, AgentTask as AgentTask, CommandAgent as CommandAgent
from .agent_loop import (
    AgentEpisode as AgentEpisode,
    AgentPlan as AgentPlan,
    agent_columns as agent_columns,
)
from .endpoint import Endpoint as Endpoint
from .verifiers_agent import VerifiersAgent as VerifiersAgent

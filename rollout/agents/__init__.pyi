from .agent import Agent as Agent, AgentTask as AgentTask, CommandAgent as CommandAgent
from .agent_loop import (
    AgentEpisode as AgentEpisode,
    AgentPlan as AgentPlan,
    agent_columns as agent_columns,
)
from .agent_process import AgentApart as AgentApart, in_process as in_process
from .endpoint import Endpoint as Endpoint
from .verifiers_agent import VerifiersAgent as VerifiersAgent

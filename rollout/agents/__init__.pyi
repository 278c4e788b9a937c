from .agent import Agent as Agent, AgentTask as AgentTask, CommandAgent as CommandAgent
from .agent_loop import AgentEpisode as AgentEpisode, agent_columns as agent_columns, run_agents as run_agents
from .endpoint import Endpoint as Endpoint
from .held_agents import AgentPlan as AgentPlan, HeldAgents as HeldAgents
from .verifiers_agent import VerifiersAgent as VerifiersAgent

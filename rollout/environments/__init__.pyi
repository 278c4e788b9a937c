from .environment import (
    Environment as Environment,
    EnvironmentFailed as EnvironmentFailed,
    MakeEnvironment as MakeEnvironment,
    Observation as Observation,
)
from .episode import Episode as Episode, EpisodeLimits as EpisodeLimits, EpisodeStart as EpisodeStart
from .episode_loop import EpisodePlan as EpisodePlan
from .episode_rows import episode_columns as episode_columns, episode_starts as episode_starts
from .other_libraries import (
    from_gymnasium as from_gymnasium,
    from_trl as from_trl,
    from_vagen as from_vagen,
    trl_tools as trl_tools,
)
from .tool_environment import ToolEnvironment as ToolEnvironment, hermes_calls as hermes_calls, with_tools as with_tools
from .turn_renderer import TurnRenderer as TurnRenderer

from .engine import (
    Completion as Completion,
    Request as Request,
    RolloutEngine as RolloutEngine,
    SamplingParams as SamplingParams,
    create_engine as create_engine,
)

"""The engine of the server: it trains and samples adapters of base models, in this process or in one of Ray."""

import json

from dataproto_server.config import EngineOptions
from dataproto_server.engine.in_process import InProcessEngine, PlacedEngine

__all__ = ["InProcessEngine", "PlacedEngine", "engine_from_json"]


def engine_from_json(text: str) -> InProcessEngine | PlacedEngine:
    """An engine of options as JSON: ``models`` (paths by name; null: the name itself) and those of `EngineOptions`.

    With ``ray``, the options of `RayConfig`, the engine is in a process of Ray. Raises the errors of `launch_worker` then.

    >>> engine_from_json('{"models": {"tiny": "path/to/tiny"}, "max_models": 8}').options.max_models
    8
    """
    given = json.loads(text)
    models, ray = {name: path or name for name, path in given.pop("models").items()}, given.pop("ray", None)
    options = EngineOptions(**given)
    return InProcessEngine(models, options) if ray is None else PlacedEngine(models, options, "ray", **ray)

"""The engine of the server: it trains and samples adapters of base models."""

import json

from dataproto_server.config import EngineOptions
from dataproto_server.engine.in_process import InProcessEngine

__all__ = ["InProcessEngine", "engine_from_json"]


def engine_from_json(text: str) -> InProcessEngine:
    """An engine of options as JSON: ``models`` (paths by name; null: the name itself) and those of `EngineOptions`.

    >>> engine_from_json('{"models": {"tiny": "path/to/tiny"}, "max_models": 8}').options.max_models
    8
    """
    given = json.loads(text)
    models = {name: path or name for name, path in given.pop("models").items()}
    return InProcessEngine(models, EngineOptions(**given))

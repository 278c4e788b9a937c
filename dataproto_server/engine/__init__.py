"""The engine of the server: it trains and samples adapters of base models in this process."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from dataproto_server.engine.engine_options import EngineOptions
    from dataproto_server.engine.in_process import InProcessEngine, engine_from_json
    from dataproto_server.engine.placed_engine import PlacedEngine, placed_engine_from_json

__all__ = ["EngineOptions", "InProcessEngine", "PlacedEngine", "engine_from_json", "placed_engine_from_json"]

__getattr__ = lazy_names(__name__, ".engine_options", ".in_process", ".placed_engine")

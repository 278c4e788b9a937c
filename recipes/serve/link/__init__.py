"""The connection between the front process and the engine process: frames of JSON and raw arrays on a Unix socket."""

from recipes.serve.link.engine_link import CallFailed, EngineLink, EngineLost
from recipes.serve.link.incidents import failure_of, server_failure

__all__ = ["CallFailed", "EngineLink", "EngineLost", "failure_of", "server_failure"]

"""The HTTP side of the server: one function a route, behind a gate that checks keys and limits."""

from recipes.serve.routes.application import application

__all__ = ["application"]

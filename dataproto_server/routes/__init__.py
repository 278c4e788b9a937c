"""The HTTP side of the server: one function a route, after a gate that checks keys and limits."""

from dataproto_server.routes.application import application

__all__ = ["application"]

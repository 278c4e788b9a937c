"""The HTTP side of the server: one function a route, after a gate that checks keys and limits."""

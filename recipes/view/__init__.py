"""A run in the browser while it goes on: ``dataproto view RUN_DIR`` serves its curves and kept rollouts on localhost."""

from recipes.view.viewer_server import ViewerServer, main

__all__ = ["ViewerServer", "main"]

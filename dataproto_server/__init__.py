"""Training driven by another program: in process by a `TrainingClient`, or by clients of the Tinker SDK over HTTP."""

from typing import TYPE_CHECKING

import recipes  # noqa: F401  # first: it sets what torch reads when it is loaded
from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from dataproto_server.backend import Backend
    from dataproto_server.training_client import ForwardBackwardOutput, SampledSequence, TrainingClient

__all__ = ["Backend", "ForwardBackwardOutput", "SampledSequence", "TrainingClient"]

__getattr__ = lazy_names(__name__, __file__)

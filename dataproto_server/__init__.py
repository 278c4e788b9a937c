"""The server of ``dataproto serve``: it trains and samples for clients of the Tinker SDK over HTTP."""

import recipes  # noqa: F401  # first: it sets what torch reads when it is loaded

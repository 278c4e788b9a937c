"""Rewards that a server computes over HTTP, and whether a server can be reached."""

import itertools
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from dataproto.errors import RewardError
from workers.roles.reward import RewardRow

ATTEMPTS = 3
"""Requests to a server that cannot be reached, or fails, before a run stops."""
PAUSE_S = 1.0
"""Seconds before the second attempt; doubled before the third."""
KNOCK_S = 10.0
"""Seconds for an answer to `check_reachable`."""


@dataclass(frozen=True)
class RewardServer:
    """A reward function that a server computes.

    The request is ``POST url`` with ``{"rows": [...]}``, each with the fields of a `RewardRow` but ``columns``. The server
    must answer with ``{"results": [{"score": float, ...}]}``, one for each row. If it cannot be reached, or fails with a status
    5xx, the request is repeated, up to `ATTEMPTS` in total.
    """

    url: str
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc:
            raise RewardError(f"{self.url!r} is not the address of a reward server: use http://host:port/path")

    def check(self) -> None:
        """Raises `RewardError` if the server cannot be reached."""
        check_reachable(self.url)

    def __call__(self, rows: Sequence[RewardRow]) -> list[Mapping[str, float]]:
        """The results of the rows.

        Raises:
            RewardError: the server rejects the request, cannot be reached, or returns another answer.
        """
        if not rows:
            return []
        body = json.dumps({"rows": [_sent(row) for row in rows]}, default=str).encode()
        answer = _ask(self.url, body, self.timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RewardError(f"{self.url} returned an answer without a list 'results'")
        return results


def _sent(row: RewardRow) -> dict[str, Any]:
    return {name: value for name, value in vars(row).items() if name != "columns"}


def check_reachable(url: str) -> None:
    """Raises `RewardError` if no connection to a server can be made, in `ATTEMPTS`. Any answer will do, also an error."""
    for attempt in itertools.count(1):
        try:
            with urlopen(Request(url, method="HEAD"), timeout=KNOCK_S):
                return
        except HTTPError:
            return
        except URLError as error:
            if isinstance(error.reason, ssl.SSLError):  # other clients may know further certificates
                return
            if attempt == ATTEMPTS:
                raise RewardError(
                    f"the reward's server at {url} cannot be reached ({attempt} attempts): {error.reason}; start it first"
                ) from error
        except (OSError, ValueError):  # connected, but no answer to HEAD
            return
        time.sleep(PAUSE_S * 2 ** (attempt - 1))


def _ask(url: str, body: bytes, timeout_s: float) -> Any:
    for attempt in itertools.count(1):
        try:
            request = Request(url, body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except json.JSONDecodeError as error:
            raise RewardError(f"{url} returned an answer that is not JSON: {error}") from error
        except (HTTPError, URLError, TimeoutError, ConnectionError) as error:
            rejected = isinstance(error, HTTPError) and error.code < 500
            if rejected or attempt == ATTEMPTS:
                raise RewardError(f"{url} did not score the rows ({attempt} attempts): {error}") from error
        time.sleep(PAUSE_S * 2 ** (attempt - 1))

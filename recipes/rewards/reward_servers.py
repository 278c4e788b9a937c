"""Rewards of servers, which score rows over HTTP."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from dataproto.errors import RewardError
from workers.roles.reward import RewardRow

ATTEMPTS = 3
"""Requests to a server that cannot be reached, or fails, before a run stops."""
PAUSE_S = 1.0
"""Seconds before the second attempt; doubled before each further one."""
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
        check_address(self.url, "a reward server: use http://host:port/path")

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
        sent = [{name: value for name, value in vars(row).items() if name != "columns"} for row in rows]
        answer = self._ask(json.dumps({"rows": sent}, default=str))
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RewardError(f"{self.url} returned an answer without a list 'results'")
        return results

    def _ask(self, body: str) -> Any:
        kind = {"Content-Type": "application/json"}
        for attempt in itertools.count(1):
            try:
                answer = httpx.post(self.url, content=body, headers=kind, timeout=self.timeout_s, follow_redirects=True)
                return answer.raise_for_status().json()
            except json.JSONDecodeError as error:
                raise RewardError(f"{self.url} returned an answer that is not JSON: {error}") from error
            except httpx.HTTPError as error:
                rejected = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
                if rejected or attempt == ATTEMPTS:
                    raise RewardError(f"{self.url} did not score the rows ({attempt} attempts): {error}") from error
            time.sleep(PAUSE_S * 2 ** (attempt - 1))


def check_address(url: str, what: str) -> None:
    """Raises `RewardError` for what is not the address of a server."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise RewardError(f"{url!r} is not the address of {what}")


def check_reachable(url: str) -> None:
    """Raises `RewardError` if no connection to a server can be made, in `ATTEMPTS`. Any answer will do, also an error."""
    for attempt in itertools.count(1):
        try:
            httpx.head(url, timeout=KNOCK_S, verify=False)  # other clients may know further certificates
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if attempt == ATTEMPTS:
                raise RewardError(
                    f"the reward's server at {url} cannot be reached ({attempt} attempts): {error}; start it first"
                ) from error
            time.sleep(PAUSE_S * 2 ** (attempt - 1))
            continue
        except httpx.HTTPError:  # connected, but no answer to HEAD
            pass
        return

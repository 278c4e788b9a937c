"""A reward function that another program computes, over HTTP."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from dataproto.errors import RewardError
from workers.roles.reward import RewardFunction, RewardRow

ATTEMPTS = 3
PAUSE_S = 1.0  # before the second attempt; doubled before the third


def remote_reward(url: str, timeout_s: float = 120.0) -> RewardFunction:
    """Scores by a server: ``POST url`` with ``{"rows": [...]}``, the fields of a `RewardRow` each, is answered with
    ``{"results": [{"score": float, ...}]}``, one for each row.

    A server that cannot be reached or fails (status 5xx) is asked again, `ATTEMPTS` times in all.

    Raises:
        RewardError: ``url`` is no http(s) address; when called, the server refuses, stays away, or answers something else.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise RewardError(f"{url!r} is no address of a reward server: http://host:port/path")

    def score_rows(rows: Sequence[RewardRow]) -> list[Mapping[str, float]]:
        if not rows:
            return []
        body = json.dumps({"rows": [vars(row) for row in rows]}, default=str).encode()
        answer = _ask(url, body, timeout_s)
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise RewardError(f"{url} answered without a list of 'results'")
        return results

    return score_rows


def _ask(url: str, body: bytes, timeout_s: float) -> Any:
    for attempt in itertools.count(1):
        try:
            request = Request(url, body, {"Content-Type": "application/json"})
            with urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except json.JSONDecodeError as error:
            raise RewardError(f"{url} answered something that is no JSON: {error}") from error
        except (HTTPError, URLError, TimeoutError, ConnectionError) as error:
            refused = isinstance(error, HTTPError) and error.code < 500
            if refused or attempt == ATTEMPTS:
                raise RewardError(f"{url} did not score the rows ({attempt} attempts): {error}") from error
        time.sleep(PAUSE_S * 2 ** (attempt - 1))

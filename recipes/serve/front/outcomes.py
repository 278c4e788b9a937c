"""What clients get for a request: protobuf for passes and samples, JSON for the rest and for failures."""

import json

from recipes.serve.backend import Failure, PassResult
from recipes.serve.ledger.journal import Outcome
from recipes.serve.wire import write_pass_result

PROTOBUF = "application/x-protobuf"


def pass_outcome(result: PassResult | Failure) -> Outcome:
    """What the client of a pass gets."""
    if isinstance(result, Failure):
        return failed(result.message, result.category)
    return Outcome(write_pass_result(result), PROTOBUF)


def failed(message: str, category: str) -> Outcome:
    """What the client of a failed request gets: status 200 with the error, which the SDK raises with its category.

    >>> failed("rank=0", "user").result
    b'{"error": "rank=0", "category": "user"}'
    """
    return Outcome(json.dumps({"error": message, "category": category}).encode(), failed=True)

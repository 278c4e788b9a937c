"""A step of the loop: what it asks of the batches that a loader gives."""

import pytest

from dataproto import DataProto
from dataproto.errors import MissingColumn
from recipes.run.loop import train_step
from recipes.run.progress import Progress


class Batches:
    skipped: dict[int, str] = {}

    def __init__(self, *batches):
        self.batches = iter(batches)

    def __next__(self):
        return next(self.batches)


NAMED, UNNAMED = (DataProto.from_dict(non_tensors={name: ["a"]}) for name in ("uid", "index"))


def two_draws(prompts, more):
    return DataProto.concat([prompts, more("wanted")]), {"score": 1.0}


def test_a_step_returns_its_metrics_and_those_of_its_batch():
    metrics = train_step(
        Batches(NAMED, NAMED), two_draws, Progress(1), lambda data, metrics, devices: {"rows": len(data) * devices}, 1
    )
    assert {"score": 1.0, "rows": 2, "data/skipped_rows": 0}.items() <= metrics.items()


@pytest.mark.parametrize("batches", [(UNNAMED,), (NAMED, UNNAMED)])
def test_prompts_without_uids_are_refused(batches):
    with pytest.raises(MissingColumn, match="'uid'"):
        train_step(Batches(*batches), two_draws, Progress(1), lambda data, metrics, devices: {}, 1)

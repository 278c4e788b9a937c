"""What a run says of its rows before it starts."""

import pytest
from torch.utils.data import Subset

from recipes.data.loader import PromptLoader
from recipes.data.problem_rows import load_rows
from recipes.data.splits import tell_data, tell_files

ROWS = list(range(10))


@pytest.mark.parametrize(
    ("batch", "held_out", "said"),
    [
        (3, Subset(ROWS, [8, 9]), ["data: 10 rows read, 8 to train on, 2 held out; 3 a step, 3 steps an epoch"]),
        (8, [1, 2, 3], ["data: 13 rows read, 8 to train on, 3 held out; 8 a step, 1 step an epoch"]),
        (
            9,
            None,
            [
                "data: 10 rows read, 8 to train on, 0 held out; 9 a step, 1 step an epoch",
                "warning: --batch-size 9 is more than the 8 rows, so that rows repeat within a step",
            ],
        ),
    ],
)
def test_rows_read_trained_on_and_held_out(batch, held_out, said, capsys):
    tell_data(PromptLoader(Subset(ROWS, range(8)), builder=None, batch_size=batch), held_out)
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(("names", "is_told"), [(["train-0", "train-1"], False), (["train", "train_old"], True)])
def test_files_that_are_no_shards_are_told(names, is_told, tmp_path, capsys):
    """A copy of a file was trained on too, in silence."""
    for name in names:
        (tmp_path / f"{name}.jsonl").write_text('{"problem": "2 + 2?", "answer": 4}\n')
    tell_files("folder", load_rows(tmp_path), "train")
    told = "folder: the rows of train are those of train.jsonl, train_old.jsonl together\n"
    assert capsys.readouterr().out == (told if is_told else "")

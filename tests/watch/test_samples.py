import json

import numpy as np
import pytest
import torch
from PIL import Image

from dataproto import DataProto, object_array
from dataproto.errors import FileFormatError
from recipes.watch.rollout_files import (
    MAX_SIDE,
    RolloutSample,
    load_rollouts,
    rollout_samples,
    rollout_steps,
    save_rollouts,
)


def sample(key="a", images=(), **changes):
    fields = {"prompt": "Find x.", "response": "\\boxed{3}", "ground_truth": "3", "reward": 1.0, "accuracy": 1.0}
    return RolloutSample(key=key, images=images, **(fields | changes))


def picture(colour, size=(8, 6)):
    return Image.new("RGB", size, colour)


def test_round_trip(tmp_path):
    rows = [
        sample("a", (picture("red"), picture("blue"))),
        sample("b", (picture("red"),), accuracy=None, response='quotes " \u2028 \x00 \ud800 \n new line'),
        sample("c"),
    ]
    save_rollouts(tmp_path, 12, rows)
    got = load_rollouts(tmp_path, 12)
    assert [vars(row) | {"images": None} for row in got] == [vars(row) | {"images": None} for row in rows]
    assert [[image.tobytes() for image in row.images] for row in got] == [
        [image.tobytes() for image in row.images] for row in rows
    ]
    assert len(list((tmp_path / "rollouts" / "images").iterdir())) == 2  # each distinct picture once


def test_same_bytes_in_another_shape_are_another_picture(tmp_path):
    save_rollouts(tmp_path, 0, [sample("a", (picture("red", (8, 6)), picture("red", (6, 8))))])
    (row,) = load_rollouts(tmp_path, 0)
    assert [image.size for image in row.images] == [(8, 6), (6, 8)]


def test_steps_are_in_order_and_a_step_written_again_replaces_the_first(tmp_path):
    assert rollout_steps(tmp_path) == []
    for step in (100, 0, 20, 100):
        save_rollouts(tmp_path, step, [sample(str(step))])
    (tmp_path / "rollouts" / "step_x.jsonl").write_text("")
    assert rollout_steps(tmp_path) == [0, 20, 100]
    assert [row.key for row in load_rollouts(tmp_path, 100)] == ["100"]


def test_large_and_odd_pictures_become_small_ones(tmp_path):
    original = Image.new("RGBA", (4000, 1000))
    save_rollouts(tmp_path, 0, [sample("a", (original, Image.new("P", (5, 5)), Image.new("I;16", (5, 5))))])
    (row,) = load_rollouts(tmp_path, 0)
    assert [image.size for image in row.images] == [(MAX_SIDE, MAX_SIDE // 4), (5, 5), (5, 5)]
    assert original.size == (4000, 1000)


def test_missing_and_broken_pictures_are_left_out(tmp_path):
    save_rollouts(
        tmp_path, 0, [sample("a", (picture("red"),)), sample("b", (picture("blue"),)), sample("c", (picture("white"),))]
    )
    names = [
        json.loads(line)["images"][0] for line in (tmp_path / "rollouts" / "step_0.jsonl").read_text().splitlines()
    ]
    (tmp_path / "rollouts" / "images" / names[0]).unlink()
    whole = (tmp_path / "rollouts" / "images" / names[1]).read_bytes()
    (tmp_path / "rollouts" / "images" / names[1]).write_bytes(whole[: len(whole) // 2])
    assert [len(row.images) for row in load_rollouts(tmp_path, 0)] == [0, 0, 1]


def test_a_picture_outside_the_folder_is_not_read(tmp_path):
    picture("red").save(tmp_path / "secret.png")
    save_rollouts(tmp_path, 0, [sample()])
    path = tmp_path / "rollouts" / "step_0.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"images": ["../../secret.png"]}))
    assert load_rollouts(tmp_path, 0)[0].images == ()


@pytest.mark.parametrize("line", ["nonsense", "[]", "{}", '{"images": [], "other": 1}'])
def test_a_damaged_line_is_named(tmp_path, line):
    path = save_rollouts(tmp_path, 0, [sample()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(FileFormatError, match="line 2"):
        load_rollouts(tmp_path, 0)


def test_samples_of_a_batch_are_the_first_of_each_problem():
    image = picture("red")
    columns = {
        "response_text": ["one", "two", "three", "four"],
        "score": [0.1, 1.0, torch.tensor(0.5), np.float64(0.25)],
        "acc": [0.0, 1.0, True, None],
        "index": [7, 7, 8, 9],
        "data_source": ["geo"] * 4,
        "uid": ["u0", "u0", "u1", "u2"],
        "raw_prompt": [[{"role": "user", "content": "<image>Find x."}]] * 4,
        "reward_model": [{"style": "rule", "ground_truth": 42}] * 4,
        "multi_modal_data": [{"image": [image]}, {"image": [image]}, {}, {}],
        "letters": [3, 3, None, 4],
    }
    data = DataProto.from_dict(non_tensors={name: object_array(values) for name, values in columns.items()})
    got = rollout_samples(data, limit=2)
    assert got == [
        RolloutSample("geo 7", "Find x.", "one", "42", 0.1, 0.0, (image,), source="geo", parts={"letters": 3.0}),
        RolloutSample("geo 8", "Find x.", "three", "42", 0.5, 1.0, (), source="geo", parts={"letters": None}),
    ]
    assert len(rollout_samples(data, limit=10)) == 3


def test_samples_of_a_batch_with_the_least_columns():
    data = DataProto.from_dict(non_tensors={"response_text": ["x"], "score": object_array([1])})
    (got,) = rollout_samples(data, limit=5)
    assert got == RolloutSample("0", "", "x", "", 1.0)

"""Rows that share media: which features they use, and what is refused."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import MediaMismatch
from dataproto.transfer import joined
from dataproto.vlm import MediaSpans, family_of, media_grids, media_spans
from dataproto.vlm.family import pooled
from dataproto.vlm.media import place
from helpers.tiny_models import image_inputs, tiny_config

CONFIG = tiny_config("qwen2_5_vl")


def distinct_media(rows):
    return family_of(CONFIG).distinct_media(rows, CONFIG)


def media(*grids, kind="image", seed=0):
    return image_inputs(CONFIG, *grids, kind=kind, seed=seed)


def test_shared_tensors_are_joined_once_and_copies_are_not():
    one, two = media((2, 4)), media((2, 2), (4, 2), seed=1)
    copy = {name: value.clone() for name, value in one.items()}
    together = distinct_media([one, two, {}, one, copy])
    assert torch.equal(together.inputs["pixel_values"], torch.cat([m["pixel_values"] for m in (one, two, copy)]))
    assert together.inputs["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 2], [1, 4, 2], [1, 2, 4]]
    assert together.images.tolist() == [[0, 2], [2, 3], [0, 0], [0, 2], [5, 2]]
    assert together.videos.tolist() == [[0, 0]] * 5


def test_video_features_follow_all_image_features():
    pictures, clip = media((2, 2)), media((2, 2, 4), kind="video")
    joined = distinct_media([clip | pictures, media((2, 4), seed=1), clip])
    assert joined.images.tolist() == [[0, 1], [1, 2], [0, 0]]
    assert joined.videos.tolist() == [[3, 4], [0, 0], [3, 4]]
    types = torch.tensor([[2, 2, 2, 2, 1], [1, 0, 0, 0, 1], [0, 2, 2, 2, 2]])
    spans = media_spans(types, joined)
    assert spans.positions.tolist() == [0, 1, 2, 3, 4, 5, 9, 11, 12, 13, 14]
    assert spans.features.tolist() == [3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6]


def test_no_media_makes_no_inputs_and_no_spans():
    joined = distinct_media([{}, {}])
    assert joined.inputs == {}
    assert len(media_spans(torch.zeros(2, 3), joined)) == 0
    assert distinct_media([]).images.shape == (0, 2)


@given(
    choice=st.lists(st.integers(0, 3), min_size=1, max_size=6), gaps=st.lists(st.integers(0, 2), min_size=6, max_size=6)
)
@settings(max_examples=50)
def test_sharing_changes_no_feature_and_packing_none_either(choice, gaps):
    sources = [{}, media((2, 4)), media((4, 4), (2, 2)), media((2, 2)) | media((3, 2, 2), kind="video")]
    kinds = [[], [1] * 2, [1] * 5, [1] + [2] * 3]
    rows = [sources[i] for i in choice]
    types = [[0] * gap + kinds[i] + [0] for i, gap in zip(choice, gaps)]
    flat = torch.tensor([list(chain(*types))])
    length, bounds = max(map(len, types)), torch.tensor([0, *map(len, types)]).cumsum(0)
    shared = distinct_media(rows)
    packed = media_spans(flat, shared, bounds)
    padded = media_spans(torch.tensor([[0] * (length - len(row)) + row for row in types]), shared)
    assert torch.equal(packed.features, padded.features)
    assert (packed.positions.diff() > 0).all()

    copies = distinct_media([{name: value.clone() for name, value in row.items()} for row in rows])
    separate = media_spans(flat, copies, bounds)
    assert torch.equal(packed.positions, separate.positions)
    assert torch.equal(first_patches(shared)[packed.features], first_patches(copies)[separate.features])


def first_patches(joined):
    """One number for each feature: the first of its four patches."""
    pixels = [joined.inputs[name] for name in ("pixel_values", "pixel_values_videos") if name in joined.inputs]
    return torch.cat([torch.zeros(0, 96), *pixels])[::4, 0]


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([[1, 1, 0], [1, 0, 0]], "row 1: 1 image placeholder tokens, but its media makes 2 features"),
        ([[0, 1, 1], [1, 1, 1]], "row 1: 3 image placeholder tokens, but its media makes 2 features"),
        ([[1, 1, 2], [1, 1, 0]], "row 0: 1 video placeholder tokens, but its media makes 0 features"),
        ([[1, 1, 0]], "2 rows of media, but 1 rows of tokens"),
    ],
)
def test_placeholders_that_do_not_fit_a_rows_media_are_named(types, message):
    one = media((2, 4))
    with pytest.raises(MediaMismatch, match=message):
        media_spans(torch.tensor(types), distinct_media([one, one]))


def test_the_row_is_named_in_a_packed_sequence_too():
    one = media((2, 4))
    joined = distinct_media([one, {}, one])
    with pytest.raises(MediaMismatch, match="row 2: 1 image placeholder tokens, but its media makes 2 features"):
        media_spans(torch.tensor([[1, 1, 0, 0, 0, 1]]), joined, torch.tensor([0, 2, 4, 6]))
    with pytest.raises(MediaMismatch, match="end at 5 of 6"):
        media_spans(torch.tensor([[1, 1, 0, 0, 1, 1]]), joined, torch.tensor([0, 2, 4, 5]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"pixel_values": torch.zeros(4, 3)}, "row 1: pixel_values without image_grid_thw"),
        ({"video_grid_thw": torch.ones(1, 3)}, "row 1: video_grid_thw without pixel_values_videos"),
        (
            {"pixel_values": torch.zeros(4, 3), "image_grid_thw": torch.tensor([[1, 2, 4]])},
            "counts 8 patches, but there are 4",
        ),
        ({"pixel_values": torch.zeros(3, 3), "image_grid_thw": torch.tensor([[1, 1, 3]])}, "divisible by 2"),
    ],
)
def test_pixels_and_grids_must_belong_together(row, message):
    with pytest.raises(MediaMismatch, match=message):
        distinct_media([{}, row])


def test_grids_of_rows_keep_repetitions():
    one, clip = media((2, 4)), media((1, 2, 2), kind="video") | {"second_per_grid_ts": [0.5]}
    grids = media_grids([one, clip, one])
    assert grids["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]]
    assert grids["video_grid_thw"].tolist() == [[1, 2, 2]]
    assert grids["second_per_grid_ts"].tolist() == [0.5]
    assert media_grids([{}]) == {"image_grid_thw": None, "video_grid_thw": None, "second_per_grid_ts": None}


def test_a_feature_used_twice_gathers_both_gradients():
    features = torch.ones(2, 3, requires_grad=True)
    embeddings = torch.zeros(2, 2, 3, requires_grad=True)
    spans = MediaSpans(torch.tensor([0, 2, 3]), torch.tensor([1, 0, 1]))
    placed = place(embeddings, features, spans)
    (placed * torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).sum().backward()
    assert features.grad[:, 0].tolist() == [3.0, 5.0]
    assert embeddings.grad[:, :, 0].tolist() == [[0.0, 2.0], [0.0, 0.0]]
    assert embeddings.abs().sum() == 0


def test_features_are_read_from_tensors_and_output_objects():
    parts = [torch.zeros(2, 3), torch.ones(1, 3)]
    output = type("Output", (), {"pooler_output": parts})()
    joined = type("Output", (), {"pooler_output": torch.cat(parts)})()
    for form in (torch.cat(parts), output, joined):
        assert pooled(form)[:, 0].tolist() == [0.0, 0.0, 1.0]


def test_media_are_joined_in_pinned_memory_where_cuda_is_used(monkeypatch):
    own, pinned = torch.empty, []

    def empty(*size, pin_memory=False, **options):
        pinned.append(pin_memory)
        return own(*size, **options)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    parts = [torch.randn(rows, 3, 2) for rows in (2, 1, 4)]
    assert torch.equal(joined(parts), torch.cat(parts))
    assert pinned == [True]
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        joined([torch.zeros(1, 3), torch.zeros(1, 2)])

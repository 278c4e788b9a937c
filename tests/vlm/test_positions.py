"""Position ids compared with a token-by-token computation and with Hugging Face's own `get_rope_index`, on random layouts."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataproto.errors import MediaMismatch
from dataproto.vlm import extend_positions, family_of
from helpers.tiny_models import MROPE_TYPES, padded, tiny_model

model_of = cache(tiny_model)
TEXT, IMAGE, VIDEO = 0, 1, 2

sides = st.integers(1, 4)
text = st.tuples(st.just("text"), st.integers(1, 5))
image = st.tuples(st.just("image"), sides, sides)
video = st.tuples(st.just("video"), st.integers(1, 4), sides, sides, st.sampled_from([0.25, 0.5, 0.7, 1.0, 1.9, 3.0]))
layouts = st.lists(st.lists(st.one_of(text, image, video), min_size=0, max_size=5), min_size=1, max_size=4)


def batch_of(layout, by_frame):
    """Token types of each row, and the grids in patches: every medium between a start and an end token."""
    rows, images, videos, seconds = [], [], [], []
    for parts in layout:
        types = [TEXT]
        for kind, *sizes in parts:
            if kind == "text":
                types += [TEXT] * sizes[0]
            elif kind == "image":
                images.append([1, 2 * sizes[0], 2 * sizes[1]])
                types += [TEXT, *[IMAGE] * (sizes[0] * sizes[1]), TEXT]
            else:
                time, height, width, second = sizes
                videos.append([time, 2 * height, 2 * width])
                seconds.append(second)
                frame = [TEXT, *[VIDEO] * (height * width), TEXT]
                types += frame * time if by_frame else [TEXT, *[VIDEO] * (time * height * width), TEXT]
        rows.append((range(len(types)), types))
    return rows, *(torch.tensor(grids) if grids else None for grids in (images, videos)), seconds or None


def by_hand(layout, model_type, mask):
    """Positions ``(B, 3, L)`` of a layout, token by token."""
    positions = torch.zeros(len(layout), 3, mask.shape[1], dtype=torch.int64)
    for row, parts in enumerate(layout):
        positions[row, :, mask[row].bool()] = torch.tensor(walk(parts, model_type)).T
    return positions


def walk(parts, model_type):
    """Time, height and width of each token of a row. Only in Qwen2.5-VL do video positions follow time, 2 positions per second in
    the tiny config.
    """
    walked, now = [(0, 0, 0)], 1

    def text(count=1):
        nonlocal now
        walked.extend((now + i,) * 3 for i in range(count))
        now += count

    def grid(time, height, width, rate=1.0):
        nonlocal now
        clock = [int(np.float32(step) * np.float32(rate)) for step in range(time)]
        walked.extend((now + t, now + h, now + w) for t in clock for h in range(height) for w in range(width))
        now += max(height, width)

    by_frame = family_of(model_type).videos_by_frame
    for kind, *sizes in parts:
        if kind == "text":
            text(*sizes)
            continue
        time, height, width, second = sizes if kind == "video" else (1, *sizes, 0.5)
        for _ in range(time if by_frame else 1):
            text()
            grid(1 if by_frame else time, height, width, 2 * second if model_type == "qwen2_5_vl" else 1.0)
            text()
    return walked


def drop_fractions(layout):
    return [[part if part[0] != "video" else (*part[:4], float(int(part[4]))) for part in row] for row in layout]


def hugging_face(model, ids, types, mask, images, videos, seconds):
    timing = {"second_per_grid_ts": seconds} if model.config.model_type == "qwen2_5_vl" else {}
    positions, _ = model.model.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=types,
        image_grid_thw=images,
        video_grid_thw=videos,
        attention_mask=mask,
        **timing,
    )
    return positions.transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MROPE_TYPES)
@given(layout=layouts, side=st.sampled_from(["left", "right"]), as_tensor=st.booleans())
@settings(max_examples=60)
def test_positions_equal_those_of_hugging_face(model_type, layout, side, as_tensor):
    model, family = model_of(model_type), family_of(model_type)
    rows, images, videos, seconds = batch_of(layout, family.videos_by_frame)
    if seconds and as_tensor:
        seconds = torch.tensor(seconds)
    ids, types, mask = padded(rows, side)
    ours = family.position_ids(types.to(torch.int8), mask, images, videos, seconds, model.config)
    assert ours.shape == (len(rows), 4, ids.shape[1])
    assert ours.dtype == torch.int64
    assert torch.equal(ours[:, 1:], by_hand(layout, model_type, mask))
    assert torch.equal(ours[:, 0], (mask.cumsum(1) - 1) * mask)
    theirs = hugging_face(model, ids, types, mask, images, videos, seconds)
    # Older releases of Hugging Face forget the fraction of a second, by which Qwen2.5-VL's videos are then out of step.
    assert any(torch.equal(theirs, by_hand(variant, model_type, mask)) for variant in (layout, drop_fractions(layout)))


@pytest.mark.parametrize("model_type", MROPE_TYPES)
@given(layout=layouts, response=st.integers(1, 6))
@settings(max_examples=30)
def test_positions_of_a_response_equal_those_of_the_whole_sequence(model_type, layout, response):
    model, family = model_of(model_type), family_of(model_type)
    rows, images, videos, seconds = batch_of(layout, family.videos_by_frame)
    ids, types, mask = padded(rows, "left")
    prompt = family.position_ids(types, mask, images, videos, seconds, model.config)
    more = torch.zeros(len(rows), response, dtype=torch.int64)
    whole = [torch.cat([part, more + fill], 1) for part, fill in ((ids, 0), (types, 0), (mask, 1))]
    expected = by_hand([[*parts, ("text", response)] for parts in layout], model_type, whole[2])
    extended = family.extend_positions(prompt, mask, response)
    assert torch.equal(torch.cat([prompt, extended], -1)[:, 1:], expected)
    assert torch.equal(extended[:, 0], mask.sum(1, keepdim=True) + torch.arange(response))


def test_a_hand_worked_row_with_two_images_and_left_padding():
    family, config = family_of("qwen2_5_vl"), model_of("qwen2_5_vl").config
    types = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 1, 1]])
    grids = torch.tensor([[1, 2, 4], [1, 4, 4]])  # 1 x 2 and 2 x 2 tokens
    assert family.position_ids(types, mask, grids, None, None, config)[0].tolist() == [
        [0, 0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 0, 1, 1, 3, 4, 4, 4, 4, 6],
        [0, 0, 1, 1, 3, 4, 4, 5, 5, 6],
        [0, 0, 1, 2, 3, 4, 5, 4, 5, 6],
    ]


def test_adjacent_images_are_separated_by_their_grids():
    family, config = family_of("qwen2_vl"), model_of("qwen2_vl").config
    grids = torch.tensor([[1, 2, 4], [1, 2, 2]])
    positions = family.position_ids(torch.tensor([[1, 1, 1, 0]]), torch.ones(1, 4), grids, None, None, config)
    assert positions[0, 3].tolist() == [0, 1, 2, 3]
    assert positions[0, 1].tolist() == [0, 0, 2, 3]


def test_video_time_follows_the_clock_in_qwen2_5_only():
    types, grid = torch.tensor([[2, 2, 2, 0]]), torch.tensor([[3, 2, 2]])
    times = {
        name: family_of(name)
        .position_ids(types, torch.ones(1, 4), None, grid, [1.5], model_of(name).config)[0, 1]
        .tolist()
        for name in ("qwen2_vl", "qwen2_5_vl")
    }
    assert times == {"qwen2_vl": [0, 1, 2, 1], "qwen2_5_vl": [0, 3, 6, 1]}  # 2 tokens per second in the tiny config


def test_a_row_without_tokens_is_extended_from_zero():
    extended = extend_positions(torch.zeros(1, 4, 3, dtype=torch.int64), torch.zeros(1, 3), 2)
    assert extended[0].tolist() == [[0, 1]] * 4


def test_extension_skips_right_padding_and_an_image_at_the_end():
    family, config = family_of("qwen2_vl"), model_of("qwen2_vl").config
    types, mask = torch.tensor([[0, 1, 1, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    positions = family.position_ids(types, mask, torch.tensor([[1, 2, 4]]), None, None, config)
    assert family.extend_positions(positions, mask, 1)[0, :, 0].tolist() == [3, 3, 3, 3]


def test_text_after_a_long_video_starts_after_its_sides_not_its_duration():
    family, config = family_of("qwen2_5_vl"), model_of("qwen2_5_vl").config
    types, mask, grid = torch.tensor([[2, 2, 2]]), torch.ones(1, 3), torch.tensor([[3, 2, 2]])
    positions = family.position_ids(types, mask, None, grid, [4.0], config)
    assert positions[0].tolist() == [[0, 1, 2], [0, 8, 16], [0, 0, 0], [0, 0, 0]]
    assert family.extend_positions(positions, mask, 1)[0, :, 0].tolist() == [3, 1, 1, 1]


def test_token_types_of_padding_do_not_count():
    family, config = family_of("qwen2_vl"), model_of("qwen2_vl").config
    types, mask = torch.tensor([[1, 0, 1, 2]]), torch.tensor([[0, 1, 1, 0]])
    positions = family.position_ids(types, mask, torch.tensor([[1, 2, 2]]), None, None, config)
    assert positions[0].tolist() == [[0, 0, 1, 0]] * 4


@pytest.mark.parametrize(
    ("types", "grids", "message"),
    [
        ([[0, 1, 1], [0, 0, 0]], [[1, 2, 2]], r"2 image placeholder tokens .* 1 grids count 1 .*\[2, 0\]"),
        ([[0, 1, 1], [0, 0, 0]], None, "2 image placeholder tokens .* 0 grids count 0"),
        ([[0, 0, 1], [0, 1, 0]], [[1, 2, 4]], "row 1: image 0 .* run of 2 .* breaks after 1"),
        ([[1, 0, 1], [0, 0, 0]], [[1, 2, 4]], "row 0: image 0 .* run of 2 .* breaks after 1"),
    ],
)
def test_placeholders_that_do_not_fit_the_grids_are_named(types, grids, message):
    family, config = family_of("qwen2_vl"), model_of("qwen2_vl").config
    types = torch.tensor(types)
    with pytest.raises(MediaMismatch, match=message):
        family.position_ids(
            types, torch.ones_like(types), None if grids is None else torch.tensor(grids), None, None, config
        )


def test_video_timing_must_be_as_long_as_the_videos():
    with pytest.raises(MediaMismatch, match="1 videos, but 2 values"):
        family_of("qwen2_5_vl").position_ids(
            torch.tensor([[2]]),
            torch.ones(1, 1),
            None,
            torch.tensor([[1, 2, 2]]),
            [1.0, 2.0],
            model_of("qwen2_5_vl").config,
        )

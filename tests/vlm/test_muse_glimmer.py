"""What Muse Glimmer has of its own: images of whole features by PIL, and logits with a scale and a soft cap."""

import ast
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from dataproto.vlm.families.muse_glimmer import fitted_size, grid_arguments
from helpers.checkpoints import write_checkpoint
from helpers.examples import at_most
from helpers.tiny_models import image_inputs, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_image_processor
from rollout.pretrained import load_image_processor
from workers.model.logprobs import token_log_probs

FAMILY = family_of("muse_glimmer")


def smart_resize(*sizes):
    """Transformers' own function, of a module that needs torchvision."""
    folder = Path(transformers.__file__).parent / "models/muse_glimmer"
    source = (folder / "image_processing_muse_glimmer.py").read_text()
    functions = [each for each in ast.parse(source).body if getattr(each, "name", "") == "smart_resize"]
    names = {"math": math, "itertools": itertools}
    exec(compile(ast.Module(functions, []), "smart_resize", "exec"), names)
    return names["smart_resize"](*sizes)


@settings(max_examples=at_most(50))
@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 300))
def test_images_are_scaled_as_by_transformers(height, width, most):
    rows, columns = fitted_size(height, width, 8, most)
    assert (rows * 8, columns * 8) == smart_resize(height, width, 8, most)


def test_patches_are_squares_of_the_image_for_each_time(tmp_path):
    processor = load_image_processor(write_checkpoint("muse_glimmer", tmp_path))
    pixels = np.random.default_rng(0).integers(0, 255, (16, 24, 3), dtype=np.uint8)
    made = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    assert processor.backend == "pil"
    assert made["image_grid_thw"].tolist() == [[1, 4, 6]]
    for place, patch in enumerate(made["pixel_values"].view(24, 2, 3, 4, 4)):
        row, column = 4 * (place // 6), 4 * (place % 6)
        square = torch.from_numpy(pixels[row : row + 4, column : column + 4] / 127.5 - 1).permute(2, 0, 1).float()
        torch.testing.assert_close(patch, square.expand(2, -1, -1, -1), atol=1e-5, rtol=0)


def test_limits_of_pixels_are_numbers_of_features():
    layout, processor = FAMILY.media_layout, tiny_image_processor("muse_glimmer")
    assert layout.processor_options(processor, None, 200) == {"max_image_tokens": 3}
    for limits, says in (((64, None), "never enlarged"), ((None, 63), "at least 64, one feature")):
        with pytest.raises(InvalidConfig, match=says):
            layout.processor_options(processor, *limits)


def test_a_table_of_positions_that_is_not_square_is_refused():
    config = tiny_config("muse_glimmer")
    config.vision_config.pos_emb_width = 8
    with pytest.raises(InvalidConfig, match="a table of 4 x 8 positions"):
        FAMILY.check_supported(config)


def test_what_depends_on_grids_alone_changes_nothing_when_computed_before():
    model = tiny_model("muse_glimmer")
    media = image_inputs(model.config, (4, 6), (8, 4))
    tower = model.model.vision_tower
    told = grid_arguments(tower, media["image_grid_thw"])
    ours = FAMILY.tower_output(model, media, **told)
    theirs = torch.cat(model.model.get_image_features(**media).pooler_output)
    torch.testing.assert_close(ours, theirs)


def test_log_probs_are_those_of_scaled_and_capped_logits():
    """Values, entropies and gradients, against autograd in float64."""
    cap = FAMILY.logit_cap(tiny_config("muse_glimmer"))
    assert cap == (2.0, 0.5)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (5, 11))
    targets, results = torch.tensor([0, 3, 10, 7, 3]), []
    for ours in (True, False):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            found, entropies = token_log_probs(states, head, targets, 0.7, entropy=True, cap=cap, chunk_elements=22)
        else:
            every = (2.0 * torch.tanh(0.5 * (states @ head.t()) / 2.0) / 0.7).log_softmax(-1)
            found, entropies = every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(1)
        (found * torch.arange(5) + entropies).sum().backward()
        results.append((found.detach(), entropies.detach(), states.grad, head.grad))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_versions_without_the_towers_positions_are_refused(monkeypatch):
    monkeypatch.setattr("dataproto.vlm.family.version", {"transformers": "5.16.1"}.__getitem__)
    with pytest.raises(InvalidConfig, match=r"need transformers 5\.17 or newer, and 5\.16\.1 is installed"):
        FAMILY.check_supported(tiny_config("muse_glimmer"))

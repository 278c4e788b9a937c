"""What the vision tower of each family is accounted for: each distinct image once, whatever its inputs are called."""

import pytest
import torch

from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.tiny_models import VLM_TYPES, image_inputs, tiny_model
from workers.model.packed_model import PackedVLM
from workers.training.accounting import required_work


@pytest.mark.parametrize("model_type", VLM_TYPES)
def test_an_image_that_rows_share_counts_once(model_type):
    model, family = tiny_model(model_type), family_of(model_type)
    sizes = [(4, 6), (8, 4)], [(6, 6)]
    prompts = prompt_batch(model.config, [sizes[0], sizes[1], [], sizes[1]], texts=[4, 7, 5, 3])[[0, 0, 1, 2, 3]]
    data = with_responses(model.config, prompts, lengths=[5, 4, 1, 6, 2], width=6)
    media = [image_inputs(model.config, *grids) for grids in sizes]
    grids = torch.cat([family.grids(each, model.config) for each in media])
    expected = 3 * family.flops(model.config, [0], grids).vision
    assert required_work(PackedVLM(model, family, 1.0), data).vision == expected > 0

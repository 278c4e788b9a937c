"""Rows with images after the prompt: packed, padded and alone they have the same log-probs, within 1e-5, in float32."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch

from dataproto import DataProto
from dataproto.columns import media_parts
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs
from helpers.episodes import DrawnEnvironment, RandomEngine, play_episodes, prompts_of, renderer_of
from helpers.forward_rows import forward_rows
from helpers.tiny_models import gradient_tolerance, rounding, tiny_model
from rollout.engine import SamplingParams
from rollout.environments import EpisodeLimits
from rollout.environments.episode_rows import episode_columns, episode_starts
from workers.model.packed_model import PackedVLM
from workers.training.forward_pass import PreparedRows, sharing
from workers.training.row_checks import check_rows

CPU = torch.device("cpu")
SAMPLING = SamplingParams(n=3, max_tokens=5)
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "internvl", "smolvlm", "gemma3", "gemma4")


@pytest.fixture(
    scope="module", params=[*((each, None) for each in MODEL_TYPES), ("qwen2_5_vl", 2), ("qwen3_vl", 2)], ids=str
)
def played(request):
    """A model, and three episodes of each of three prompts; those of a prompt begin alike, and go on with different pictures.

    With a number of last pictures, episodes have several rows.
    """
    model_type, last_pictures = request.param
    renderer = renderer_of(model_type)
    prompts = prompts_of(renderer.builder, 3)
    starts = episode_starts(prompts, SAMPLING)
    limits = EpisodeLimits(turns=3, last_pictures=last_pictures)
    episodes = play_episodes(RandomEngine(renderer), renderer, starts, DrawnEnvironment, SAMPLING, limits)
    data = episode_columns(prompts.repeat(3, interleave=True), episodes, renderer, 15)
    assert (len(data) > len(episodes)) == (last_pictures is not None)
    return tiny_model(model_type, config=renderer.builder.config), data


def packed(model):
    return PackedVLM(copy.deepcopy(model), family_of(model.config), 1.0)


def test_packed_rows_are_those_alone(played):
    model, data = played
    module = packed(model)
    check_rows(data, module)
    assert any(len(media_parts(media)) > 1 for media in data["multi_modal_inputs"])
    with torch.no_grad():
        expected = padded_log_probs(model, data)
        outputs = forward_rows(module, data, CPU).log_probs
        each = torch.cat([forward_rows(module, data[row : row + 1], CPU).log_probs for row in range(len(data))])
    torch.testing.assert_close(outputs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(each, expected, atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once_though_other_pictures_follow_it(played):
    model, data = played
    module = packed(model)
    shared = sharing(module, data)
    uids = data["uid"].tolist()
    assert shared.tolist() == [False, *(uid == before for before, uid in pairwise(uids))]
    rows = PreparedRows(module, data).packed
    width = data["response_mask"].shape[1]
    lengths = data["attention_mask"].sum(1)
    prompts = data["attention_mask"][:, :-width].sum(1)
    assert rows.input_ids.shape[1] == int(lengths.sum() - prompts[shared].sum())


def test_each_distinct_image_is_encoded_once(played):
    model, data = played
    module = packed(model)
    grids = module.family.grids(PreparedRows(module, data).media(module, torch.device("cpu"))[0].inputs, model.config)
    parts = {
        id(part["pixel_values"]): part for media in data["multi_modal_inputs"] for part in media_parts(media) if part
    }
    assert len(grids) == len(module.family.grids(list(parts.values()), model.config))
    assert len(parts) < sum(len([part for part in media_parts(media) if part]) for media in data["multi_modal_inputs"])


@pytest.mark.slow
def test_gradients_are_those_of_rows_alone(played):
    model, data = played
    reference, module = copy.deepcopy(model), packed(model)
    weights = torch.randn(data["response_mask"].shape, generator=torch.Generator().manual_seed(0))
    (padded_log_probs(reference, data) * weights).sum().backward()
    (forward_rows(module, data, CPU).log_probs * weights).sum().backward()
    ours = dict(module.model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            error = (ours[name].grad - parameter.grad).norm()
            assert error <= gradient_tolerance(model.config.model_type) * parameter.grad.norm() + rounding(name), name


def test_wire_and_file_keep_the_pictures_of_turns_once(played, tmp_path):
    _, data = played
    data.save_to_disk(tmp_path / "episodes.dp")
    for again in (DataProto.load_from_disk(tmp_path / "episodes.dp"), pickle.loads(pickle.dumps(data, protocol=5))):
        distinct = [
            {id(part["pixel_values"]) for media in each["multi_modal_inputs"] for part in media_parts(media) if part}
            for each in (data, again)
        ]
        assert len(distinct[0]) == len(distinct[1])
        for one, other in zip(data["multi_modal_inputs"], again["multi_modal_inputs"], strict=True):
            assert len(media_parts(one)) == len(media_parts(other))
            for a, b in zip(media_parts(one), media_parts(other), strict=True):
                assert a.keys() == b.keys()
                assert all(a[name].equal(b[name]) for name in a)

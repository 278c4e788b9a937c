"""What is Gemma 4's own: padded patches, heads of two sizes, keys that are values or belong to earlier layers, and a soft cap."""

import copy

import pytest
import torch
from transformers import Gemma4AudioConfig

from dataproto.errors import InvalidConfig, InvalidRow, MediaMismatch
from dataproto.vlm import family_of
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.tiled_models import tiled_rows, write_with_pictures
from helpers.tiny_models import image_inputs, rounding, tiny_config, tiny_model
from helpers.tiny_prompts import tiny_builder, tiny_image_processor
from rollout.engine import SamplingParams
from rollout.hf import HFEngine
from rollout.pretrained import load_image_processor
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel.activation_checkpointing import ActivationCheckpointing
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker

FAMILY, CONFIG, CPU = family_of("gemma4"), tiny_config("gemma4"), torch.device("cpu")


def shared_keys():
    """Four layers, of which the last two have the keys and values of the first two."""
    config = tiny_config("gemma4")
    text = config.text_config.to_dict() | {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "use_double_wide_mlp": True,
        "attention_k_eq_v": False,
        "per_layer_config": {1: {"head_dim": 64}, 3: {"head_dim": 64}},
    }
    config.text_config = type(config.text_config)(**text)
    return config


def test_prompts_are_hugging_faces(tmp_path):
    path = write_with_pictures("gemma4", tmp_path)
    builder, rows = PromptBuilder.from_pretrained(path, max_prompt_length=512), tiled_rows(path)
    batch, images = builder(rows), load_image_processor(path)
    seen = set()
    for row, source in enumerate(rows):
        media = batch["multi_modal_data"][row].get("image", [])
        made = images(images=media, return_tensors="pt") if media else {}
        pieces = source["prompt"].split("<image>")
        text = pieces[0].strip()
        for number, piece in enumerate(pieces[1:]):
            count = int(made["num_soft_tokens_per_image"][number])
            text += (
                f"<|image>{'<|image|>' * count}<image|>{piece.strip()}"  # as `Gemma4Processor.replace_image_token` does
            )
        ids = builder.encode_text(f"<|turn>user\n{text}<turn|>\n<|turn>model\n")
        kept = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row, kept].tolist() == ids
        assert builder.prompt_length(source) == len(ids)
        if media:
            kept = (made["image_position_ids"] >= 0).all(-1)
            for name, values in batch["multi_modal_inputs"][row].items():
                assert torch.equal(values, made[name][kept])
            seen |= set(made["num_soft_tokens_per_image"].tolist())
    assert len(seen) > 1  # images of unequal size


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_keys_of_earlier_layers_are_those_of_hugging_face(checkpointing):
    config = shared_keys()
    config.text_config.output_hidden_states = (
        True  # else transformers 5.23 cuts embeddings by layer, which are not there
    )
    model = tiny_model("gemma4", config=config)
    prompts = prompt_batch(config, [[(4, 6), (8, 4)], []], texts=[4, 5])[[0, 0, 1]]
    data = with_responses(config, prompts, lengths=[5, 3, 6], width=6)
    weights = torch.randn(3, 6, generator=torch.Generator().manual_seed(0)) * data["response_mask"]
    expected = padded_log_probs(model, data)
    (expected * weights).sum().backward()
    packed = PackedVLM(copy.deepcopy(model), FAMILY, 1.0)
    packed.model.zero_grad()
    if checkpointing != "none":
        ActivationCheckpointing(Ranks(), ModelConfig(activation_checkpointing=checkpointing)).apply(packed)
    found = forward_rows(packed, data, CPU).log_probs
    (found * weights).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    ours = dict(packed.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert (ours[name].grad - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + rounding(name), name


@pytest.mark.parametrize(
    ("layers", "sharing", "expected"), [(35, 20, range(13, 35)), (42, 18, range(22, 42)), (6, 0, range(0))]
)
def test_layers_that_share_keys_begin_with_those_that_keep_them(layers, sharing, expected):
    """Gemma-4-E2B and E4B, whose full layers are every fifth and every sixth, and a model without."""
    config = tiny_config("gemma4+per_layer")
    every = 5 if layers == 35 else 6
    kinds = ["full_attention" if layer % every == every - 1 else "sliding_attention" for layer in range(layers)]
    sizes = {"num_hidden_layers": layers, "num_kv_shared_layers": sharing, "layer_types": kinds}
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | sizes)
    assert family_of(config).undivided_layers(config) == expected


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"enable_moe_block": True, "num_experts": 4, "hidden_size_per_layer_input": 8},
            "experts and per-layer embeddings",
        ),
        ({"use_bidirectional_attention": "all"}, "attention of all tokens to all"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(option, says, tmp_path):
    config = tiny_config("gemma4")
    config.text_config = type(config.text_config)(**config.text_config.to_dict() | option)
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=f"models of type gemma4 with .*{says}.* are not supported"):
        ActorWorker(ActorConfig(str(tmp_path)), CPU)


def test_a_model_without_a_tower_is_refused_by_name(tmp_path):
    config = tiny_config("gemma4")
    config.vision_config = None
    config.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=r"without a vision tower \(vision_config is None\)"):
        ActorWorker(ActorConfig(str(tmp_path)), CPU)


def test_constants_of_layers_survive_an_export(tmp_path):
    """They are buffers of the checkpoint, which no optimizer changes."""
    model = tiny_model("gemma4")
    for layer, scale in zip(model.model.language_model.layers, (0.5, 0.75), strict=True):
        layer.layer_scalar.fill_(scale)
    model.save_pretrained(tmp_path / "before")
    ActorWorker(ActorConfig(str(tmp_path / "before")), CPU).save(tmp_path / "after")
    again = FAMILY.model_class().from_pretrained(tmp_path / "after" / "huggingface")
    assert [layer.layer_scalar.item() for layer in again.model.language_model.layers] == [0.5, 0.75]


def with_audio(path):
    """A checkpoint of a small model with a tower for audio, whose attention Hugging Face has in plain products alone."""
    config = tiny_config("gemma4+per_layer")
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32}
    config.audio_config = Gemma4AudioConfig(**small)
    torch.manual_seed(0)
    model = FAMILY.model_class().from_config(config)
    model.save_pretrained(path)
    return model


@pytest.mark.slow
def test_a_tower_for_audio_is_not_loaded_and_stays_in_exports(tmp_path):
    model = with_audio(tmp_path / "before")
    actor = ActorWorker(ActorConfig(str(tmp_path / "before")), CPU)
    prompts = prompt_batch(model.config, [[(4, 6)], []], texts=[4, 5])
    data = with_responses(model.config, prompts, lengths=[5, 3], width=6)
    actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
    assert not any("audio" in name for name, _ in actor.named_weights())
    actor.save(tmp_path / "after")
    again, report = FAMILY.model_class().from_pretrained(tmp_path / "after" / "huggingface", output_loading_info=True)
    assert not any(report.values()), report
    weights = dict(again.named_parameters())
    audio = {name for name, _ in model.named_parameters() if "audio" in name}
    assert len(audio) > 10
    assert audio >= {name for name, weight in model.named_parameters() if torch.equal(weights[name], weight)}


def test_the_hf_engine_reads_a_checkpoint_with_a_tower_for_audio(tmp_path):
    model = with_audio(tmp_path)
    engine, sampling = (
        HFEngine(str(tmp_path), device=CPU, dtype="float32"),
        SamplingParams(max_tokens=4, temperature=0.0),
    )
    prompts = prompt_batch(model.config, [[(4, 6)], []], texts=[4, 5])
    found = engine.generate(build_requests(prompts, sampling), sampling)
    assert [len(completion.token_ids) for completion in found] == [4, 4]


@pytest.mark.parametrize(
    ("least", "most", "features"), [(None, None, 70), (None, 9000, 70), (30000, None, 1120), (5000, 9000, 140)]
)
def test_pixel_limits_are_numbers_of_features(least, most, features):
    options = FAMILY.media_layout.processor_options(tiny_image_processor("gemma4"), least, most)
    assert options == {"max_soft_tokens": features}


def test_impossible_requests_are_named():
    with pytest.raises(InvalidConfig, match="images of this family have about"):
        FAMILY.media_layout.processor_options(tiny_image_processor("gemma4"), None, 300)
    with pytest.raises(InvalidRow, match=r"the text contains <\|image>"):
        tiny_builder("gemma4")([{"prompt": "a <|image>"}])
    inputs = image_inputs(CONFIG, (4, 6))
    with pytest.raises(MediaMismatch, match=r"row 1: pixel_values without image_position_ids"):
        FAMILY.distinct_media([{}, {"pixel_values": inputs["pixel_values"]}], CONFIG)
    inputs["image_position_ids"] = inputs["image_position_ids"][:-1]
    with pytest.raises(MediaMismatch, match=r"row 0: .* do not fill images in squares of 2"):
        FAMILY.distinct_media([inputs], CONFIG)

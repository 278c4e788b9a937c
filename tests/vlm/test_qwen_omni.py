"""The thinkers of Qwen-Omni: sounds among images and videos, against Hugging Face's own forward and positions.

They need transformers 5.19 or newer.
"""

from functools import cache, partial
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch.nn.functional import pad

from dataproto.errors import InvalidConfig, MediaMismatch
from dataproto.packing import pack_rows
from dataproto.vlm import family_of, media_grids, media_spans
from helpers.batches import padded_log_probs, prompt_batch, with_responses
from helpers.checkpoints import write_checkpoint
from helpers.tiny_models import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    END,
    IMAGE,
    OMNI_TYPES,
    START,
    VIDEO,
    embedded,
    forward_media,
    image_inputs,
    padded,
    sounds,
    tiny_model,
    whole_omni,
)
from rollout import SamplingParams
from rollout.hf import HFEngine
from rollout.prompts import PromptBuilder
from rollout.responses import build_requests
from workers.roles.actor import ActorConfig, ActorWorker

model_of = cache(tiny_model)
every_type = pytest.mark.parametrize("model_type", OMNI_TYPES)
HEARD = (AUDIO_START, AUDIO, AUDIO_END)


def pictures(config, *sizes, kind="image", seed=0):
    made = image_inputs(config, *sizes, kind=kind, seed=seed)
    return {name: value for name, value in made.items() if name not in ("input_features", "audio_feature_lengths")}


def rows(model):
    """A picture and two sounds, text, a sound, a video of 3 time steps before a sound, the first sounds again."""
    family, config = family_of(model), model.config
    one = pictures(config, (4, 6)) | sounds(config, 9, 30)
    other = pictures(config, (3, 4, 4), kind="video", seed=1) | sounds(config, 21, seed=2)
    other["second_per_grid_ts"] = torch.tensor([0.6])
    picture, seen = (START, IMAGE, END), (START, VIDEO, END)
    written = [
        ([1, *HEARD, 2, *picture, 5, *HEARD, 7], one),
        ([3, 4, 5], {}),
        ([*HEARD, 9, 8], sounds(config, 8, seed=3)),
        ([10, *seen, 20, *HEARD, 21], other),
        ([6, *picture, 11, *HEARD, *HEARD], one),
    ]
    return [family.expand(ids, media, config) for ids, media in written], [media for _, media in written]


def theirs_of(model):
    """The module that has the towers: until transformers 5.20 the model itself."""
    return model if hasattr(model, "audio_tower") else model.model


def theirs(model, ids, mask, media):
    """Logits of Hugging Face's forward for padded rows."""
    joined = {name: torch.cat([row[name] for row in media if name in row]) for row in media for name in row}
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **forward_media(model, joined)).logits


def packed(model, made, media):
    family = family_of(model)
    ids, types, mask = padded(made, "right")
    kept = mask.bool()
    positions = family.position_ids(types, mask, **media_grids(media), config=model.config)
    distinct = family.distinct_media(media, model.config)
    spans = media_spans(types[kept][None], distinct, pad(mask.sum(1).cumsum(0), (1, 0)))
    embeddings, extras = embedded(family, model, ids[kept][None], distinct.inputs, spans)
    places = positions.transpose(0, 1)[..., kept].unsqueeze(-2)
    bounds = pack_rows(ids, mask, types, torch.zeros(len(ids), 0), types).cu_seqlens
    return model.lm_head(family.decode(model, embeddings, places, extras, cu_seq_lens_q=bounds))[0]


@every_type
def test_log_probs_and_gradients_equal_a_padded_forward(model_type):
    model = model_of(model_type)
    made, media = rows(model)
    ids, _, mask = padded(made, "left")
    found = {}
    for name in ("ours", "theirs"):
        model.zero_grad()
        logits = packed(model, made, media) if name == "ours" else theirs(model, ids, mask, media)[mask.bool()]
        logits.log_softmax(-1)[:, :9].square().sum().backward()
        grads = {path: p.grad.clone() for path, p in model.named_parameters() if p.grad is not None}
        found[name] = logits.log_softmax(-1).detach(), grads
    (ours, gradients), (expected, reference) = found["ours"], found["theirs"]
    assert (ours - expected).abs().max() < 1e-5
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name
    assert reference[f"{family_of(model).audio_blocks}.0.fc1.weight"].norm() > 0
    model.zero_grad()


@pytest.mark.parametrize(
    ("model_type", "grid", "seconds", "frames"),
    [
        ("qwen2_5_omni_thinker", (3, 4, 4), 0.7, 41),
        ("qwen2_5_omni_thinker", (6, 2, 4), 1.0, 8),
        ("qwen2_5_omni_thinker", (2, 4, 4), 1.0, 120),
        ("qwen3_omni_moe_thinker", (3, 4, 4), 0.6, 41),
        ("qwen3_omni_moe_thinker", (6, 2, 4), 1.0, 8),
        ("qwen3_omni_moe_thinker", (2, 4, 4), 1.0, 120),
    ],
)
def test_a_videos_sound_lies_at_the_positions_of_hugging_face(model_type, grid, seconds, frames):
    model, family = model_of(model_type), family_of(model_type)
    heard, each = int(family.media_layout.sound_features(torch.tensor(frames))), grid[1] * grid[2] // 4
    run = family.joined_run(grid, seconds, heard, model.config)
    assert run.count(VIDEO) == grid[0] * each
    assert run.count(AUDIO) == heard
    ids = torch.tensor([[1, 2, START, AUDIO_START, *run, AUDIO_END, END, 3, 4]])
    mask = torch.ones_like(ids)
    times, shown = torch.tensor([seconds]), torch.tensor([grid])
    expected, _ = theirs_of(model).get_rope_index(
        ids, None, shown, mask, use_audio_in_video=True, audio_seqlens=torch.tensor([frames]), second_per_grids=times
    )
    types = family.token_types(ids, model.config)
    ours = family.position_ids(types, mask, None, shown, times, model.config)
    assert torch.equal(ours[:, 1:], expected.transpose(0, 1))
    assert ours[0, 1, 2:5].tolist() == ([2, 2, 3] if family.shared_ends else [2, 3, 4])


@every_type
def test_a_videos_sound_is_among_its_tokens_in_the_order_of_hugging_faces_processor(model_type):
    family, config, random = family_of(model_type), model_of(model_type).config, Random(0)
    name = {"qwen2_5_omni_thinker": "Qwen2_5OmniProcessor", "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor"}[
        model_type
    ]
    processor = getattr(transformers, name)
    theirs = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2),
        get_chunked_index=partial(processor.get_chunked_index, None),
        **{f"{kind}_{part}": "" for kind in ("audio", "vision") for part in ("bos_token", "eos_token")},
        video_token="v",
        audio_token="a",
    )
    pace = {"position_id_per_seconds": config.position_id_per_seconds, "seconds_per_chunk": 2}
    for _ in range(50):
        grid = random.randint(1, 8), 2 * random.randint(1, 2), 2 * random.randint(1, 2)
        heard, seconds = random.randint(1, 120), random.choice([0.4, 0.5, 0.6, 1.0, 1.7, 2.0])
        shown = {"video_grid_thw": np.array([grid]), "video_second_per_grid": [seconds]}
        expected = processor.replace_video_with_audio_token(
            theirs, shown, 0, {"num_audio_tokens": np.array([heard])}, 0, **pace
        )
        assert "".join("va"[token == AUDIO] for token in family.joined_run(grid, seconds, heard, config)) == expected


@every_type
def test_positions_of_sounds_pictures_and_videos_equal_hugging_face(model_type):
    model, family = model_of(model_type), family_of(model_type)
    made, media = rows(model)
    ids, types, mask = padded(made, "left")
    lengths = torch.cat([row["audio_feature_lengths"] for row in media if row])
    shown = media_grids(media)
    expected, _ = theirs_of(model).get_rope_index(
        ids, shown["image_grid_thw"], shown["video_grid_thw"], mask, False, lengths, shown["second_per_grid_ts"]
    )
    ours = family.position_ids(types, mask, **shown, config=model.config)[:, 1:].transpose(0, 1)
    assert torch.equal(ours[:, mask.bool()], expected[:, mask.bool()])


def test_sounds_that_do_not_fit_their_placeholders_are_refused():
    model = model_of("qwen2_5_omni_thinker")
    family, config = family_of(model), model.config
    with pytest.raises(MediaMismatch, match="count 9 mel frames, but there are 8"):
        family.media_layout.grids("audio", sounds(config, 8) | {"audio_feature_lengths": torch.tensor([9])}, config)
    with pytest.raises(MediaMismatch, match="needs 3 mel frames of each sound"):
        family.media_layout.grids("audio", sounds(config, 8, 2), config)
    with pytest.raises(MediaMismatch, match="2 audio placeholders"):
        family.expand([AUDIO, 1, AUDIO], sounds(config, 8), config)
    ids = torch.tensor([[AUDIO, AUDIO]])
    with pytest.raises(MediaMismatch, match="row 0: 2 audio placeholder tokens, but its media makes 5"):
        media_spans(family.token_types(ids, config), family.distinct_media([sounds(config, 21)], config))


@every_type
@pytest.mark.parametrize("kind", ["image", "sound"])
def test_a_tower_without_media_runs_and_weighs_nothing(model_type, kind):
    model, family = model_of(model_type), family_of(model_type)
    media = pictures(model.config, (4, 6)) if kind == "image" else sounds(model.config, 8, 30)
    ids = [1, START, IMAGE, END, 2] if kind == "image" else [*HEARD, *HEARD]
    made = [family.expand(ids, media, model.config)]
    row, _, mask = padded(made, "left")
    logits = packed(model, made, [media])
    assert (logits - theirs(model, row, mask, [media])[0]).abs().max() < 1e-5
    counts = family.feature_counts(media, model.config)
    assert len(family.features(model, media)) == sum(counts)
    idle = theirs_of(model).audio_tower.layers[0].fc1 if kind == "image" else theirs_of(model).visual.patch_embed.proj
    (gradient,) = torch.autograd.grad(logits.sum(), idle.weight)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@every_type
def test_a_short_sound_has_the_same_features_whatever_is_next_to_it(model_type):
    """Hugging Face fills up each chunk to the longest of the batch, which Qwen3-Omni's convolutions see."""
    model, family = model_of(model_type), family_of(model_type)
    config = model.config
    short, long = ({"input_features": torch.randn(n, 8), "audio_feature_lengths": torch.tensor([n])} for n in (20, 200))
    both = {name: torch.cat([short[name], long[name]]) for name in short}
    with torch.no_grad():
        single, joined = family.features(model, short), family.features(model, both)
        reference = theirs_of(model).get_audio_features(**audio(model, both)).last_hidden_state
    count = family.feature_counts(short, config)[2]
    assert (joined[:count] - single).abs().max() < 1e-5
    assert (joined[:, 0] - reference).abs().max() < 1e-5


def audio(model, media):
    return {name: value for name, value in forward_media(model, media).items() if name != "audio_feature_lengths"}


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr("dataproto.vlm.family.version", lambda _: "5.18.1")
    with pytest.raises(InvalidConfig, match=r"need transformers 5\.19 or newer, and 5\.18\.1 is installed"):
        family_of("qwen2_5_omni_thinker").check_supported(model_of("qwen2_5_omni_thinker").config)


@pytest.mark.slow
def test_the_talker_of_a_whole_checkpoint_is_not_loaded_and_stays_in_exports(tmp_path):
    model = whole_omni(tmp_path / "before")
    actor = ActorWorker(ActorConfig(str(tmp_path / "before")), torch.device("cpu"))
    prompts = prompt_batch(model.thinker.config, [[(4, 6)], []], texts=[4, 5])
    data = with_responses(model.thinker.config, prompts, lengths=[5, 3], width=6)
    expected = padded_log_probs(model.thinker.eval(), data)
    assert (actor.log_probs(data)["old_log_probs"] - expected).abs().max() < 1e-5
    actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
    assert not any("talker" in name or "token2wav" in name for name, _ in actor.named_weights())
    actor.save(tmp_path / "after")
    folder = tmp_path / "after" / "huggingface"
    again = type(model).from_pretrained(folder)
    assert again.speaker_map.keys() == {"Ethan"}
    weights = dict(again.named_parameters())
    kept = {name for name, weight in model.named_parameters() if torch.equal(weights[name], weight)}
    assert kept >= {name for name in weights if not name.startswith("thinker.")}
    assert f"thinker.{family_of(model.thinker).audio_tower}.conv1.weight" not in kept
    trained = dict(ActorWorker(ActorConfig(str(folder)), torch.device("cpu")).named_weights())
    assert all(torch.equal(weight, weights[f"thinker.{name}"]) for name, weight in trained.items())
    engine, sampling = (
        HFEngine(str(folder), device="cpu", dtype="float32"),
        SamplingParams(max_tokens=4, temperature=0.0),
    )
    assert [len(each.token_ids) for each in engine.generate(build_requests(prompts, sampling), sampling)] == [4, 4]


@every_type
def test_greedy_tokens_equal_those_of_hugging_face(model_type, tmp_path):
    """A picture and a sound, and a film with its sound, from what `PromptBuilder` makes of them."""
    write_checkpoint(model_type, tmp_path)
    builder = PromptBuilder.from_pretrained(tmp_path, 512)
    noise = np.random.default_rng(0)
    heard = [noise.uniform(-0.5, 0.5, samples).astype(np.float32) for samples in (20_000, 33_000)]
    film = (noise.integers(0, 255, (4, 16, 16, 3), dtype=np.uint8), {"fps": 2.0})
    rows = [
        {"prompt": "<image>Who <audio>speaks?", "images": [Image.new("RGB", (16, 24), "red")], "audios": heard[:1]},
        {"prompt": "<video>Who speaks?", "videos": [{"video": film, "audio": heard[1]}]},
    ]
    prompts, sampling = builder(rows), SamplingParams(max_tokens=6, temperature=0.0)
    engine = HFEngine(str(tmp_path), device=torch.device("cpu"), dtype="float32")
    ours = [each.token_ids for each in engine.generate(build_requests(prompts, sampling), sampling)]
    model = family_of(builder.config).model_class().from_pretrained(tmp_path, dtype=torch.float32)
    banned = list(family_of(builder.config).banned_ids(builder.config))
    for row, media in enumerate(prompts["multi_modal_inputs"]):
        ids = prompts["input_ids"][row, prompts["attention_mask"][row].bool()][None]
        found = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **forward_media(model, media),
            use_audio_in_video=row == 1,
            suppress_tokens=banned,
            max_new_tokens=6,
            do_sample=False,
        )
        assert found[0, ids.shape[1] :].tolist() == list(ours[row])

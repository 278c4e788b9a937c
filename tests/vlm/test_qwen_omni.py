"""Qwen2.5-Omni's thinker: sounds among images and videos, against Hugging Face's own forward and positions."""

from functools import cache

import pytest
import torch
import transformers
from torch.nn.functional import pad

from dataproto.errors import MediaMismatch
from dataproto.packing import pack_rows
from dataproto.vlm import media_grids, media_spans
from dataproto.vlm.families.qwen2_5_omni import Qwen25OmniThinker, sound_features
from helpers.tiny_models import _BASE_TEXT, _ROPE, _VISION, END, IMAGE, START, VIDEO, padded

AUDIO, AUDIO_START, AUDIO_END = 254, 248, 249
FAMILY = Qwen25OmniThinker()


@cache
def model():
    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {k: v for k, v in _VISION["qwen2_5_vl"].items() if k != "tokens_per_second"}
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config=_BASE_TEXT | {"rope_parameters": _ROPE},
        vision_config=vision,
        audio_config={
            "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
            "output_dim": 64, "n_window": 4, "max_source_positions": 64,
        },
        image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO, vision_start_token_id=START,
        vision_end_token_id=END, audio_start_token_id=AUDIO_START, audio_end_token_id=AUDIO_END,
        position_id_per_seconds=5, seconds_per_chunk=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    made = transformers.Qwen2_5OmniThinkerForConditionalGeneration._from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    with torch.no_grad():
        for weight in made.state_dict().values():
            weight.add_(torch.randn_like(weight) * 0.05)
    return made.eval()


def sound(*frames, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_features": torch.randn(sum(frames), 8, generator=generator),
        "audio_feature_lengths": torch.tensor(frames),
    }


def grids(*sizes, kind="image", seed=0):
    grid = torch.tensor(sizes)
    pixels = torch.randn(int(grid.prod(-1).sum()), 96, generator=torch.Generator().manual_seed(seed))
    return {f"pixel_values{'' if kind == 'image' else '_videos'}": pixels, f"{kind}_grid_thw": grid}


def rows():
    """A picture and two sounds, text, a sound, a video of 3 time steps with a sound of its own, the first sounds again."""
    one = grids((1, 4, 6)) | sound(9, 30)
    other = grids((3, 4, 4), kind="video", seed=1) | sound(21, seed=2) | {"second_per_grid_ts": torch.tensor([0.7])}
    picture, heard, seen = (START, IMAGE, END), (AUDIO_START, AUDIO, AUDIO_END), (START, VIDEO, END)
    written = [
        ([1, *heard, 2, *picture, 5, *heard, 7], one),
        ([3, 4, 5], {}),
        ([*heard, 9, 8], sound(8, seed=3)),
        ([10, *seen, 20, *heard, 21], other),
        ([6, *picture, 11, *heard, *heard], one),
    ]
    return [FAMILY.expand(ids, media, model().config) for ids, media in written], [media for _, media in written]


def theirs(ids, mask, media, **told):
    """Keywords of Hugging Face's forward for padded rows."""
    joined = {name: torch.cat([row[name] for row in media if name in row]) for row in media for name in row}
    if "input_features" in joined:
        lengths = joined.pop("audio_feature_lengths")
        parts = joined.pop("input_features").split(lengths.tolist())
        joined["input_features"] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)
        joined["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if "second_per_grid_ts" in joined:
        joined["video_second_per_grid"] = joined.pop("second_per_grid_ts")
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False, **joined, **told}


def packed(made, media):
    ids, types, mask = padded(made, "right")
    kept = mask.bool()
    positions = FAMILY.position_ids(types, mask, **media_grids(media), config=model().config)
    distinct = FAMILY.distinct_media(media, model().config)
    cu_seqlens = pad(mask.sum(1).cumsum(0), (1, 0))
    embeddings, extras = FAMILY.embed(
        model(), ids[kept][None], distinct.inputs, media_spans(types[kept][None], distinct, cu_seqlens)
    )
    places = positions.transpose(0, 1)[..., kept].unsqueeze(-2)
    bounds = pack_rows(ids, mask, types, torch.zeros(len(ids), 0), types).cu_seqlens
    return model().lm_head(FAMILY.decode(model(), embeddings, places, extras, cu_seq_lens_q=bounds))[0]


def test_log_probs_and_gradients_equal_a_padded_forward():
    made, media = rows()
    ids, _, mask = padded(made, "left")
    found = {}
    for name in ("ours", "theirs"):
        model().zero_grad()
        logits = packed(made, media) if name == "ours" else model()(**theirs(ids, mask, media)).logits[mask.bool()]
        logits.log_softmax(-1)[:, :9].square().sum().backward()
        grads = {path: p.grad.clone() for path, p in model().named_parameters() if p.grad is not None}
        found[name] = logits.log_softmax(-1).detach(), grads
    (ours, gradients), (expected, reference) = found["ours"], found["theirs"]
    assert (ours - expected).abs().max() < 1e-5
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-5, name
    assert reference["model.audio_tower.conv1.weight"].norm() > 0
    model().zero_grad()


@pytest.mark.parametrize("sizes", [((3, 4, 4), 0.7, 41), ((6, 2, 4), 1.0, 8), ((2, 4, 4), 1.0, 120)])
def test_a_videos_sound_lies_at_the_positions_of_hugging_face(sizes):
    grid, seconds, frames = sizes
    heard, each = int(sound_features(torch.tensor(frames))), grid[1] * grid[2] // 4
    # Two seconds of the video, two of the sound, and so on, as the processor writes them.
    step = torch.tensor([int(t * torch.tensor(seconds).float() * 5) for t in range(grid[0])])
    run = []
    for chunk in range(max(int(step[-1]) // 10, (heard - 1) // 10) + 1):
        run += [VIDEO] * int((step // 10 == chunk).sum()) * each
        run += [AUDIO] * max(0, min(heard - 10 * chunk, 10))
    ids = torch.tensor([[1, 2, START, AUDIO_START, *run, AUDIO_END, END, 3, 4]])
    mask = torch.ones_like(ids)
    times, shown = torch.tensor([seconds]), torch.tensor([grid])
    expected, _ = model().model.get_rope_index(
        ids, None, shown, mask, use_audio_in_video=True, audio_seqlens=torch.tensor([frames]), second_per_grids=times
    )
    types = FAMILY.token_types(ids, model().config)
    ours = FAMILY.position_ids(types, mask, None, shown, times, model().config)
    assert torch.equal(ours[:, 1:], expected.transpose(0, 1))


def test_positions_of_sounds_pictures_and_videos_equal_hugging_face():
    made, media = rows()
    ids, types, mask = padded(made, "left")
    lengths = torch.cat([row["audio_feature_lengths"] for row in media if row])
    shown = media_grids(media)
    expected, _ = model().model.get_rope_index(
        ids, shown["image_grid_thw"], shown["video_grid_thw"], mask, False, lengths, shown["second_per_grid_ts"]
    )
    ours = FAMILY.position_ids(types, mask, **shown, config=model().config)[:, 1:].transpose(0, 1)
    assert torch.equal(ours[:, mask.bool()], expected[:, mask.bool()])


def test_sounds_that_do_not_fit_their_placeholders_are_refused():
    config = model().config
    with pytest.raises(MediaMismatch, match="count 9 mel frames, but there are 8"):
        FAMILY.media_layout.feature_counts("audio", sound(8) | {"audio_feature_lengths": torch.tensor([9])}, config)
    with pytest.raises(MediaMismatch, match="2 audio placeholders"):
        FAMILY.expand([AUDIO, 1, AUDIO], sound(8), config)
    ids = torch.tensor([[AUDIO, AUDIO]])
    with pytest.raises(MediaMismatch, match="row 0: 2 audio placeholder tokens, but its media makes 5"):
        media_spans(FAMILY.token_types(ids, config), FAMILY.distinct_media([sound(21)], config))


@pytest.mark.parametrize("kind", ["image", "sound"])
def test_a_tower_without_media_runs_and_weighs_nothing(kind):
    media = grids((1, 4, 6)) if kind == "image" else sound(8, 30)
    ids = (
        [1, START, IMAGE, END, 2] if kind == "image" else [AUDIO_START, AUDIO, AUDIO_END, AUDIO_START, AUDIO, AUDIO_END]
    )
    made = [FAMILY.expand(ids, media, model().config)]
    row, _, mask = padded(made, "left")
    logits = packed(made, [media])
    assert (logits - model()(**theirs(row, mask, [media])).logits[0]).abs().max() < 1e-5
    idle = model().model.audio_tower.conv1 if kind == "image" else model().model.visual.patch_embed.proj
    (gradient,) = torch.autograd.grad(logits.sum(), idle.weight)
    assert torch.equal(gradient, torch.zeros_like(gradient))

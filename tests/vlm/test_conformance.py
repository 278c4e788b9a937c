"""What every family must hold, against Hugging Face's own forward. A new family passes by being in `tiny_models`."""

import json
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from transformers import AutoConfig, DynamicCache

from dataproto.errors import MediaMismatch
from dataproto.packing import pack_rows
from dataproto.vlm import family_of, media_grids, media_spans
from helpers.tiny_models import (
    ALL_TYPES,
    END,
    FURTHER_TYPES,
    GEMMA4_TYPES,
    MOE_TYPES,
    OMNI_TYPES,
    START,
    TILED,
    VIDEO,
    VLM_TYPES,
    embedded,
    expand,
    forward_inputs,
    forward_positions,
    gradient_tolerance,
    image_inputs,
    padded,
    placeholder,
    rounding,
    takes_video,
    tiny_model,
    token_by_token,
)
from rollout.sampling import project
from workers.model.attention import use_packed_attention
from workers.model.gated_delta_net import use_packed_recurrence
from workers.model.image_blocks import image_blocks

model_of = cache(tiny_model)
every_type = pytest.mark.parametrize("model_type", ALL_TYPES)
with_a_tower = pytest.mark.parametrize("model_type", [*VLM_TYPES, *FURTHER_TYPES, "idefics3"])

GRIDS = ([(4, 6), (8, 4)], [(2, 2)], [(6, 2)])
"""Images of three sources of media; the last has a video too where the family has any."""


def rows_of(family, config, video=True):
    """Expanded ids with types, and the media of each row; two rows share theirs."""
    sources = [image_inputs(config, *grids, seed=2 * number) for number, grids in enumerate(GRIDS)]
    one, clips = placeholder(config.model_type), [None] * len(GRIDS)
    prompts = [  # and which media: two images, none, one image, the first two again, an image and perhaps a video
        ([1, 2, *one, 5, *one, 7], 0),
        ([3, 4, 5], None),
        ([*one, 9, 8], 1),
        ([6, *one, *one, 11, 12, 13, 14], 0),
        ([10, *one, 20, 21], 2),
    ]
    if takes_video(config.model_type):
        clips[2] = image_inputs(config, (3, 4, 4), kind="video", seed=4)
        if config.model_type == "qwen2_5_vl":
            clips[2]["second_per_grid_ts"] = torch.tensor([2.0])
        sources[2] |= clips[2]
        prompts[4] = ([10, *one, 20, START, VIDEO, END, 21], 2)
    rows, media = [], []
    for ids, which in prompts if video else prompts[:4]:
        grids, clip = ([], None) if which is None else (GRIDS[which], clips[which])
        rows.append(expand(config, ids, *grids, clip=clip, seconds=[[0.5, 2.0, 3.5]]))
        media.append({} if which is None else sources[which])
    return rows, media


def padded_logits(model, ids, types, mask, media):
    """The reference: one padded forward of Hugging Face, media of every row computed on its own.

    Of a model with recurrent layers one forward for each row, without padding.
    """
    if family_of(model).recurrent_mixers is not None and len(ids) > 1:
        out = torch.zeros(*ids.shape, model.config.get_text_config().vocab_size)
        for row, kept in enumerate(mask.bool()):
            one = (x[row : row + 1, kept] for x in (ids, types, mask))
            with token_by_token():
                out[row, kept] = padded_logits(model, *one, media[row : row + 1])[0]
        return out
    names = dict.fromkeys(name for row in media for name in row)
    joined = {name: torch.cat([row[name].clone() for row in media if name in row]) for name in names}
    return model(input_ids=ids, attention_mask=mask, use_cache=False, **forward_inputs(model, types, joined)).logits


def packed_logits(model, rows, media):
    """Our path: rows one after another, no mask, features computed once."""
    family = family_of(model)
    ids, types, mask = padded(rows, "right")
    kept = mask.bool()
    positions = forward_positions(family.position_ids(types, mask, **media_grids(media), config=model.config))
    distinct = family.distinct_media(media, model.config)
    spans = media_spans(types[kept][None], distinct, pad(mask.sum(1).cumsum(0), (1, 0)))
    embeddings, extras = embedded(family, model, ids[kept][None], distinct.inputs, spans)
    places = positions[..., kept].unsqueeze(-2)
    packed = pack_rows(ids, mask, types, torch.zeros(len(ids), 0), types)
    with packed_layers(model):
        mutual = family.mutual_images(model.config)
        blocks = {"image_blocks": image_blocks(packed, mutual == "windowed")} if mutual else {}
        hidden = family.decode(model, embeddings, places, extras, cu_seq_lens_q=packed.cu_seqlens, **blocks)
    return logits_of(model, hidden[0])


def logits_of(model, hidden):
    """With the soft cap."""
    family = family_of(model)
    logits = project(hidden.flatten(0, -2), family.lm_head(model).weight, family.logit_cap(model.config))
    return logits.view(*hidden.shape[:-1], -1)


@contextmanager
def packed_layers(model):
    """Attention of Hugging Face finds rows by their positions; layers whose tokens see more or less of them are ours in here."""
    family = family_of(model)
    use_packed_recurrence(model, family)
    if family.mutual_images(model.config):
        use_packed_attention(model)
    yield
    if family.mutual_images(model.config):
        model.set_attn_implementation("sdpa")
    for mixer in family.recurrent_modules(model).values():
        del mixer.forward


@pytest.mark.parametrize("side", ["left", "right"])
@every_type
def test_positions_and_packed_log_probs_equal_a_padded_forward(model_type, side):
    model = model_of(model_type)
    rows, media = rows_of(family_of(model), model.config)
    ids, types, mask = padded(rows, side)
    with torch.no_grad():
        expected = padded_logits(model, ids, types, mask, media)[mask.bool()].log_softmax(-1)
        ours = packed_logits(model, rows, media).log_softmax(-1)
    assert (ours - expected).abs().max() < 1e-5
    assert expected.std() > 0.1  # the bound means something


@every_type
def test_packed_gradients_equal_those_of_a_padded_forward(model_type):
    model = tiny_model(model_type)
    rows, media = rows_of(family_of(model), model.config)
    ids, types, mask = padded(rows, "left")
    weight = torch.randn(int(mask.sum()), 1, generator=torch.Generator().manual_seed(5))
    (padded_logits(model, ids, types, mask, media)[mask.bool()].log_softmax(-1)[:, :9] * weight).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    (packed_logits(model, rows, media).log_softmax(-1)[:, :9] * weight).sum().backward()
    tolerance = gradient_tolerance(model_type)
    for name, parameter in model.named_parameters():
        if expected[name] is None:  # an embedding in the tower for sound, which nothing reads
            assert parameter.grad is None
            assert name.endswith("audio_bos_eos_token.weight")
            continue
        difference = (parameter.grad - expected[name]).norm()
        assert difference <= tolerance * expected[name].norm() + 1e-7 + rounding(name), name
    for part in family_of(model).vision_parts[:1]:
        first, _ = next(iter(model.get_submodule(part).named_parameters()))
        assert expected[f"{part}.{first}"].norm() > 0


@with_a_tower
def test_shared_media_equal_separate_media(model_type):
    model, family = model_of(model_type), family_of(model_type)
    rows, media = rows_of(family, model.config, video=False)
    copies = [{name: value.clone() for name, value in row.items()} for row in media]
    size = [len(row.get("pixel_values", ())) for row in media]
    assert size[3] == size[0] > 0
    assert len(family.distinct_media(media, model.config).inputs["pixel_values"]) == sum(size[:3])
    assert len(family.distinct_media(copies, model.config).inputs["pixel_values"]) == sum(size)
    grads = []
    for source in (media, copies):
        logits = packed_logits(model, rows, source).log_softmax(-1)
        tower = model.get_submodule(family.vision_tower)
        names = ["", *(name for name, _ in tower.named_parameters())]
        grads.append((logits, *torch.autograd.grad(logits[:, 3].sum(), list(tower.parameters()))))
    tolerance = 1e-4 if model_type in GEMMA4_TYPES else 1e-5  # whose tower sums over padding
    for name, shared, separate in zip(names, *grads):
        assert (shared - separate).norm() <= tolerance * separate.norm() + 1e-7 + rounding(name), name


@every_type
def test_generation_with_a_cache_equals_the_whole_sequence(model_type):
    model, family = model_of(model_type), family_of(model_type)
    rows, media = rows_of(family, model.config)
    ids, types, mask = padded(rows, "left")
    answers = torch.tensor([[30, 31, 32]]).expand(len(rows), 3)
    whole = [pad(part, (0, 3), value=fill) for part, fill in ((ids, 0), (types, 0), (mask, 1))]
    whole[0][:, -3:] = answers
    positions = family.position_ids(types, mask, **media_grids(media), config=model.config)
    following = forward_positions(family.extend_positions(positions, mask, 3))
    distinct = family.distinct_media(media, model.config)
    with torch.no_grad():
        expected = padded_logits(model, *whole, media)[:, -4:].log_softmax(-1)
        cache_ = DynamicCache(config=model.config)
        embeddings, extras = embedded(family, model, ids, distinct.inputs, media_spans(types, distinct))
        hidden = [
            family.decode(
                model,
                embeddings,
                forward_positions(positions),
                extras,
                attention_mask=family.decoder_masks(model, embeddings, mask, types, cache_),
                cache=cache_,
            )
        ]
        for step in range(3):
            embeddings, extras = embedded(family, model, answers[:, step : step + 1], {})
            mask = pad(mask, (0, 1), value=1)
            now = following[..., step : step + 1]
            hidden.append(family.decode(model, embeddings, now, extras, attention_mask=mask, cache=cache_))
        ours = logits_of(model, torch.cat([part[:, -1:] for part in hidden], 1)).log_softmax(-1)
    assert (ours - expected).abs().max() < 1e-5


@every_type
def test_text_alone_needs_no_tower(model_type):
    model, family = model_of(model_type), family_of(model_type)
    ids = torch.tensor([[1, 2, 3]])
    embeddings, extras = embedded(family, model, ids, {})
    assert extras.keys() == ({"per_layer_inputs"} if model_type == "gemma4+per_layer" else set())
    assert torch.equal(embeddings, model.get_input_embeddings()(ids))
    with pytest.raises(MediaMismatch, match="both come from one"):
        family.merge(model, ids, torch.zeros(1, 1, 64), None)


@with_a_tower
def test_the_smallest_image_runs_the_tower_and_weighs_nothing(model_type):
    model, family = model_of(model_type), family_of(model_type)
    ids, mask = torch.tensor([[1, 2, 3]]), torch.ones(1, 3)
    positions = forward_positions(family.position_ids(0 * ids, mask, None, None, None, model.config))
    nothing = media_spans(torch.zeros(1, 3), family.distinct_media([{}], model.config))
    dummy = family.dummy_media(model.config)
    hidden = [
        family.decode(model, embeddings, positions, extras)
        for embeddings, extras in (embedded(family, model, ids, {}), embedded(family, model, ids, dummy, nothing))
    ]
    assert torch.equal(*hidden)
    parts = [model.get_submodule(path) for path in family.vision_parts]
    weights = [p for part in parts for name, p in part.named_parameters() if name != "audio_bos_eos_token.weight"]
    gradients = torch.autograd.grad(hidden[1].sum(), weights)
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)
    levels = 1 + len(getattr(model.config.vision_config, "deepstack_visual_indexes", ()))
    count = 4 if model_type in (*TILED, "gemma3") else 1
    made = count + ("audio" in family.media_layout.kinds)
    assert family.features(model, dummy).shape == (made, levels, model.config.text_config.hidden_size)
    assert family.distinct_media([dummy], model.config).images.tolist() == [[0, count]]


@with_a_tower
def test_vision_keywords_reach_the_tower(model_type):
    model, family = model_of(model_type), family_of(model_type)
    seen = {}
    hook = model.get_submodule(family.vision_tower).register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    inputs = image_inputs(model.config, (2, 2))
    row = {name: x for name, x in inputs.items() if name not in family.media_layout.audio_names}
    family.features(model, family.distinct_media([row], model.config).inputs, a_keyword=3)
    hook.remove()
    assert seen["a_keyword"] == 3


@every_type
def test_module_paths_and_the_tensor_parallel_plan_exist(model_type):
    model, family = model_of(model_type), family_of(model_type)
    text = model.config.get_text_config()
    assert len(model.get_submodule(family.decoder_layers)) == text.num_hidden_layers
    assert model.get_submodule(family.embedding) is model.get_input_embeddings()
    assert family.lm_head(model) is model.get_output_embeddings()
    assert model.get_submodule(family.final_norm).weight.shape == (text.hidden_size,)
    tower, mergers = (
        {id(p) for path in paths for p in model.get_submodule(path).parameters()}
        for paths in (family.vision_parts, family.mergers)
    )
    if family.vision_tower is not None:
        assert len(model.get_submodule(family.vision_blocks)) == 2
        assert mergers
        assert not tower <= mergers
    language = {id(p) for p in model.get_submodule(family.language_model).parameters()}
    head = {id(p) for p in family.lm_head(model).parameters()}
    assert tower | mergers | language | head == {id(p) for p in model.parameters()}

    theirs = dict(text.base_model_tp_plan or {})  # Qwen3-VL has none for its dense decoder
    for hook in ("layers.*.mlp.experts", "layers.*.experts"):  # of theirs, no layouts
        theirs.pop(hook, None)
    theirs.pop("embed_tokens", None)  # each rank has all of them here
    theirs = {
        path: style
        for path, style in theirs.items()
        if not style.startswith("replicated")
        and (family.experts is not None or ".experts" not in path)  # which other models of the type have
        and ".linear_attn." not in path  # recurrent layers, which they do not split
    }
    fused = {
        "colwise_gather_output": "packed_colwise",
        "rowwise_split_input": "rowwise",
    }  # they compute fused layers whole
    theirs = {path: fused.get(style, style) for path, style in theirs.items()}
    plan = dict(family.tensor_plan)
    assert plan.pop(family.head) == "colwise"
    ours = {path.removeprefix(f"{family.language_model}."): style for path, style in plan.items()}
    assert theirs.items() <= ours.items()
    # Older releases split experts over ranks whole, by another plan.
    own = (
        "experts.",
        ".linear_attn",
        *(["self_attn."] if model_type == "kimi_k25" else []),
        *(["embed_tokens_per_layer"] if model_type == "gemma4+per_layer" else []),
    )  # latent attention they leave whole, and embeddings by layer
    assert not theirs or all(any(part in path for part in own) for path in ours.keys() - theirs.keys())
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    unused = [path for path, _ in family.tensor_plan if not any(fnmatchcase(name, path) for name in names)]
    dense = model_type not in ("qwen3_vl_moe", "internvl+qwen3_moe", "qwen3_omni_moe_thinker")
    assert unused == (
        [] if dense else [f"{family.decoder_layers}.*.mlp.{name}_proj" for name in ("gate", "up", "down")]
    )


def load(path):
    """A checkpoint, with proof that nothing in it is missing, left over or of another shape."""
    family = family_of(json.loads((path / "config.json").read_text())["model_type"])
    model, report = family.model_class().from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    return model


def assert_equal_parameters(model, other):
    assert type(model) is type(other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@every_type
def test_nothing_of_a_saved_checkpoint_is_left_at_random(model_type, tmp_path):
    model = model_of(model_type)
    model.save_pretrained(tmp_path)
    assert_equal_parameters(load(tmp_path), model)
    assert family_of(AutoConfig.from_pretrained(tmp_path)) is family_of(model)


@every_type
def test_rollout_weights_are_a_checkpoint(model_type, tmp_path):
    model, family = model_of(model_type), family_of(model_type)
    model.save_pretrained(tmp_path)
    converted = dict(family.rollout_weights(model.state_dict().items(), model.config))
    written = {family.stored_name(name) for name in load_file(tmp_path / "model.safetensors")}
    if (
        model_type in MOE_TYPES and model_type != "qwen3_vl_moe"
    ):  # Hugging Face writes each expert apart, published checkpoints hold them together
        written = {name for name in written if ".experts." not in name} | {
            name for name in converted if ".experts." in name
        }
    if model_type == "gemma3":  # published checkpoints have a name more for the tower's parts than Hugging Face writes
        written = {name.replace("vision_tower.", "vision_tower.vision_model.") for name in written}
    if model_type in OMNI_TYPES:  # in a published checkpoint the thinker is a part
        written = {name if name.startswith("thinker.") else f"thinker.{name}" for name in written}
    assert converted.keys() == written
    save_file({name: w.contiguous() for name, w in converted.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert_equal_parameters(load(tmp_path), model)


@every_type
def test_expert_weights_have_the_layout_of_published_checkpoints(model_type):
    model, family = model_of(model_type), family_of(model_type)
    experts = [(name, weight) for name, weight in model.named_parameters() if ".experts." in name]
    shapes = {weight.shape for _, weight in family.rollout_weights(experts, model.config)}
    # (experts, hidden, 2 x intermediate) and (experts, intermediate, hidden)
    # which vLLM turns round on loading; those of Qwen3.5 lie as in the model
    published = {"qwen3_vl_moe": {(4, 64, 256), (4, 128, 64)}, "qwen3_5_moe": {(4, 64, 64), (4, 64, 32)}}
    published["glm4v_moe"] = published["glm46v+glm4v_moe_text"] = {(8, 256, 64), (8, 64, 128)}
    published["internvl+qwen3_moe"] = {(4, 256, 64), (4, 64, 128)}
    published["kimi_k25"] = {(32, 64), (64, 32)}  # apart, expert by expert
    published["qwen3_omni_moe_thinker"] = {(128, 64), (64, 128)}
    published["gemma4+moe"] = {(4, 64, 64), (4, 64, 32)}
    assert shapes == published.get(model_type, set())

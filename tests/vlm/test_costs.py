"""Operation counts: hand-worked, and against PyTorch's counter."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dataproto.vlm import family_of, media_grids, media_spans
from dataproto.vlm.families.qwen3_5 import CHUNK, recurrence_flops
from helpers.tiny_models import (
    EACH_TYPE,
    GEMMA4_TYPES,
    embedded,
    expand,
    forward_positions,
    image_inputs,
    placeholder,
    takes_video,
    tiny_config,
    tiny_model,
)

GRIDS = ((4, 6), (8, 4))


def test_a_hand_worked_decoder():
    text = SimpleNamespace(
        hidden_size=8,
        intermediate_size=10,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=20,
    )
    vision = SimpleNamespace(
        embed_dim=4,
        hidden_size=8,
        mlp_ratio=2,
        depth=2,
        in_channels=3,
        temporal_patch_size=2,
        patch_size=2,
        spatial_merge_size=2,
    )
    config = SimpleNamespace(vision_config=vision, get_text_config=lambda: text)
    cost = family_of("qwen2_vl").flops(config, [3, 2], torch.tensor([[2, 2, 4]]), logit_tokens=1)
    # query and output 8 x 8, key and value 8 x 4, three of 8 x 10: 432 weights a layer
    assert cost.language_linear == 2 * 5 * 3 * (64 + 64 + 32 + 32 + 240)
    assert cost.language_attention == 4 * 8 * (6 + 3) * 3
    assert cost.lm_head == 2 * 1 * 8 * 20
    # 16 patches: embedding 24 x 4, blocks 4 x 16 + 2 x 4 x 8; 4 merged tokens: 16 x 16 + 16 x 8
    assert cost.vision_linear == 2 * (16 * (96 + 2 * 128) + 4 * 384)
    assert cost.vision_attention == 4 * 4 * 2 * (2 * 8**2)  # two frames of 8 patches, two blocks
    assert cost.total == cost.vision + cost.language


def test_rows_without_media_cost_no_vision():
    model = tiny_model("qwen3_vl")
    cost = family_of(model).flops(model.config, torch.tensor([4, 0]))
    assert cost.vision == 0
    assert cost.language > 0


def counts_of(counter):
    """Operations by name; of the products, those that make rotary angles, which some releases write as a product too."""
    counts = counter.get_flop_counts()
    rotary = [sum(ops.values()) for module, ops in counts.items() if module.endswith(".rotary_emb")]
    return {str(name): count for name, count in counts.get("Global", {}).items()} | {"rotary": sum(rotary)}


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_counts_equal_those_of_the_counter(model_type):
    model = tiny_model(model_type)
    model.set_attn_implementation("eager")  # plain products, which the counter knows, unlike fused ones on a CPU
    if family_of(model).experts is not None:
        model.set_experts_implementation("eager")
    family, config = family_of(model), model.config
    grids = [(8, 4), (4, 8)] if model_type in GEMMA4_TYPES else GRIDS  # whose tower pads images to one length
    row = image_inputs(config, *grids)
    one = placeholder(model_type)
    ids, types = expand(config, [1, *one, 2, *one, 3], *grids)
    ids, types = torch.tensor(ids)[None], torch.tensor(types)[None]
    mask = torch.ones_like(ids)
    positions = family.position_ids(types, mask, **media_grids([row]), config=config)
    media = family.distinct_media([row], config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        embeddings, extras = embedded(family, model, ids, media.inputs, media_spans(types, media))
        vision = counts_of(counter)
        family.lm_head(model)(family.decode(model, embeddings, forward_positions(positions), extras))
    everything = counts_of(counter)
    ours = family.flops(config, [ids.shape[1]], family.grids(row, config))

    text, length = config.get_text_config(), ids.shape[1]
    recurrent = list(getattr(text, "layer_types", None) or ()).count("linear_attention")
    # Theirs pad the sequence at both ends of a convolution, and to whole chunks.
    convolved, rule = theirs_alone(text, length) if recurrent else (0, 0)

    def linear(counts):
        return sum(count for name, count in counts.items() if name.split(".")[-1] in {"mm", "addmm", "convolution"})

    def attention(counts):
        return counts.get("aten.bmm", 0) - counts.get("rotary", 0)

    assert ours.vision_linear == linear(vision)
    assert ours.language_linear + ours.lm_head == linear(everything) - linear(vision) - recurrent * convolved
    assert ours.vision_attention == attention(vision)
    # the counter counts the full square, we what is below the diagonal and, in some layers, within a window
    square = attention(everything) - attention(vision) - recurrent * rule
    attended = ours.language_attention - recurrent * length * (recurrence_flops(text) if recurrent else 0)
    if model_type in GEMMA4_TYPES:  # whose heads are wider in layers without a window
        sizes = {"sliding_attention": 32, "full_attention": 64}
        squares = [4 * 2 * size * text.layer_types.count(kind) for kind, size in sizes.items()]
        assert square == sum(squares) * length**2
        near = sum(min(place + 1, text.sliding_window) for place in range(length))
        assert attended == squares[0] * near + squares[1] * length * (length + 1) // 2
        return
    windows = [getattr(text, "sliding_window", None)] * list(getattr(text, "layer_types", None) or ()).count(
        "sliding_attention"
    )
    windows += [length] * (text.num_hidden_layers - recurrent - len(windows))
    pairs = sum(min(place + 1, window) for window in windows for place in range(length))
    assert attended * len(windows) * length**2 == square * pairs


def theirs_alone(text, length):
    """Operations of one recurrent layer that the counter finds in Hugging Face's code: of the convolution on padding, and of the
    rule's products, to which `recurrence_flops` adds the triangular systems that the counter does not know.
    """
    keys, values = text.linear_key_head_dim, text.linear_value_head_dim
    width, heads = text.linear_conv_kernel_dim, text.linear_num_value_heads
    channels = 2 * text.linear_num_key_heads * keys + heads * values
    systems = heads * CHUNK * (keys + values)
    padded = -(-length // CHUNK) * CHUNK
    return 2 * width * channels * (width - 1), padded * (recurrence_flops(text) - systems)


def media_rows(config):
    """Rows of two images, none, the first row's own again, a video, an image and a video, as far as the family has any."""
    pictures, takes = image_inputs(config, *GRIDS), takes_video(config.model_type)
    video = image_inputs(config, (2, 4, 6), kind="video") if takes else {}
    return [pictures, {}, pictures, video, image_inputs(config, (6, 6), seed=1) | video]


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_costs_by_row_add_up_to_those_of_the_batch(model_type):
    config = tiny_config(model_type)
    family, lengths, media = family_of(model_type), [40, 7, 30, 25, 0], media_rows(config)
    costs = family.row_flops(config, lengths, media)
    for row, length in enumerate(lengths):
        assert costs[row] == family.flops(config, [length], family.grids(media[row], config)).total
    grids = torch.cat([family.grids(row, config) for row in media])
    assert costs.sum() == family.flops(config, lengths, grids).total
    some = family.row_flops(config, lengths, logit_tokens=[1, 2, 3, 4, 0])
    assert some.sum() == family.flops(config, lengths, logit_tokens=10).total
    assert family.row_flops(config, [], []).tolist() == []


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_a_part_costs_its_first_row_whole_and_of_others_what_they_do_not_share(model_type):
    """Three samples of one prompt with images, then a text row: attention of a response also pays for the prompt's keys."""
    config, family = tiny_config(model_type), family_of(model_type)
    pictures = image_inputs(config, *GRIDS)
    lengths, shared, logits = torch.tensor([30, 28, 26, 9]), torch.tensor([0, 20, 20, 0]), torch.tensor([10, 8, 6, 5])
    costs, lead = family.row_costs(config, lengths, [pictures, pictures, pictures, {}], shared, logits)

    def language(length, logit_tokens):
        return family.flops(config, [length], logit_tokens=logit_tokens).total

    vision = family.flops(config, [0], family.grids(pictures, config)).total
    assert lead.tolist() == [0, vision + language(20, 0), vision + language(20, 0), 0]
    assert costs.tolist() == [
        vision + language(30, 10),
        language(28, 8) - language(20, 0),
        language(26, 6) - language(20, 0),
        language(9, 5),
    ]

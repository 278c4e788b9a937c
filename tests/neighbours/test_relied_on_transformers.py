"""What we take from transformers; see docs/neighbours.md."""

import inspect
import io
import sys
from importlib.metadata import version
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version
from PIL import Image
from torch import nn
from transformers import AttentionInterface, DynamicCache
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_of_frames

from dataproto.vlm.media import image_grid
from helpers.neighbours import relied_on
from helpers.tiny_models import tiny_config, tiny_model
from rollout.prompts.images import load_image
from workers.model.patches import keep_value, route_attention


@relied_on(
    "transformers", "5.24.0", "`rollout.prompts.images` gives processors pictures whose info has no transparent colour."
)
def test_processors_paint_the_transparent_colour_of_a_converted_picture_white():
    drawing = Image.new("P", (56, 56))
    drawing.putpalette([0, 0, 0, 0, 0, 0])
    drawing.paste(1, (0, 0, 56, 28))  # black, as the transparent ground is
    file = io.BytesIO()
    drawing.save(file, "PNG", transparency=0)
    converted = Image.open(file).convert("RGB")
    black, white, found, ours = (
        Qwen2VLImageProcessorPil()(images=[image], return_tensors="pt")["pixel_values"]
        for image in (Image.new("RGB", (56, 56)), Image.new("RGB", (56, 56), "white"), converted, load_image(converted))
    )
    assert converted.info["transparency"] == (0, 0, 0)
    painted = Version(version("transformers")) >= Version("5.21")
    assert torch.equal(found, white if painted else black)
    assert torch.equal(ours, black)


@pytest.fixture
def qwen_vl_utils(monkeypatch):
    """Its module for media, which imports torchvision, which these tests do not use."""
    for name in ("torchvision", "torchvision.io", "torchvision.transforms"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    import qwen_vl_utils.vision_process as module

    yield module
    for name in [name for name in sys.modules if name.startswith("qwen_vl_utils")]:
        del sys.modules[name]


@relied_on(
    "transformers", "5.24.0", "`dataproto.vlm.media.image_grid` counts the tokens of a picture as its processor does."
)
def test_two_functions_of_one_name_resize_thin_pictures_differently(qwen_vl_utils):
    limits = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 14 * 14 * 4 * 1280}
    assert tuple(smart_resize(10, 1500, **limits)) == (28, 700)  # the sides change together
    assert tuple(qwen_vl_utils.smart_resize(10, 1500, **limits)) == (28, 1512)
    rows, columns = image_grid(10, 1500, limits["min_pixels"], limits["max_pixels"], 14, 2)
    assert (rows * 14, columns * 14) == (28, 700)


@relied_on("qwen-vl-utils", "0.0.14", "`rollout.prompts.videos` decodes files by `fetch_video` with these arguments.")
def test_videos_are_decoded_with_a_patch_size_and_their_metadata(qwen_vl_utils):
    assert {"image_patch_size", "return_video_metadata"} <= set(inspect.signature(qwen_vl_utils.fetch_video).parameters)


@relied_on("transformers", "5.24.0", "docs/data.md says that Hugging Face's videos share a budget, and ours do not.")
def test_three_frames_cost_more_than_six():
    size = Qwen3VLVideoProcessor.size
    limits = {"factor": 32, "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}

    def tokens(frames: int) -> int:
        height, width = smart_resize_of_frames(frames, 480, 640, **limits)
        return -(-frames // 2) * height * width // 32**2

    assert (tokens(3), tokens(6), tokens(64)) == (468, 351, 384)
    with pytest.raises(ValueError, match="t:1 must be larger"):
        tokens(1)
    own = {"size": size, "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "max_video_tokens": 768}
    capped = SimpleNamespace(**own, cap_pixels_per_frame=True)
    assert Qwen3VLVideoProcessor.get_num_of_video_patches(capped, 64, 480, 640) // 4 == 4160


@relied_on(
    "transformers",
    "5.24.0",
    "`workers.model.attention` gets segments and no mask, and computes all layers by one name.",
)
def test_a_registered_attention_gets_no_mask_and_the_keywords_of_a_forward():
    seen: list[tuple[object, ...]] = []

    def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, note=None, **_):
        seen.append((attention_mask, note, key.shape[1] < query.shape[1]))
        return query.transpose(1, 2), None

    AttentionInterface.register("a_canary", attention)
    model = tiny_model("qwen2_5_vl")
    route_attention(model.model.language_model, "a_canary")
    positions = torch.arange(6).expand(4, 1, 6)
    model.model.language_model(
        inputs_embeds=torch.zeros(1, 6, model.config.text_config.hidden_size),
        position_ids=positions,
        use_cache=False,
        note="mine",
    )
    layers = model.config.text_config.num_hidden_layers
    assert seen == [(None, "mine", True)] * layers


@relied_on(
    "transformers", "5.24.0", "The packed attention's name contains 'flash', so that a tower makes one call a layer."
)
@pytest.mark.parametrize(("name", "calls"), [("a_flash_canary", 1), ("a_canary", 2)])
def test_a_tower_makes_one_call_a_layer_under_names_with_flash_only(name, calls):
    lengths: list[int] = []

    def attention(module, query, key, value, attention_mask, cu_seq_lens_q=None, **_):
        lengths.append(query.shape[2])
        return query.transpose(1, 2), None

    AttentionInterface.register(name, attention)
    tower = tiny_model("qwen2_vl").model.visual
    route_attention(tower, name)
    patch = tower.config.in_channels * tower.config.temporal_patch_size * tower.config.patch_size**2
    tower(torch.zeros(8, patch), grid_thw=torch.tensor([[1, 2, 2], [1, 2, 2]]))
    assert len(lengths) == calls * len(tower.blocks)


@relied_on("transformers", "5.24.0", "`workers.model.patches.keep_value` keeps what a model is loaded with.")
def test_initialisation_leaves_marked_parameters_as_they_are():
    model = tiny_model("qwen2_5_vl")
    first, second = model.model.language_model.layers[:2]
    for layer in (first, second):
        nn.init.constant_(layer.mlp.up_proj.weight, 7.0)
    for parameter in model.parameters():
        keep_value(parameter)
    del second.mlp.up_proj.weight._is_hf_initialized
    for module in (first.mlp.up_proj, second.mlp.up_proj):
        model._init_weights(module)
    assert bool((first.mlp.up_proj.weight == 7.0).all())
    assert not bool((second.mlp.up_proj.weight == 7.0).any())


@relied_on(
    "transformers", "5.24.0", "Packed rows give four rows of positions, the first for text, from `family.position_ids`."
)
def test_three_rows_of_positions_are_silently_wrong_for_packed_rows():
    model = tiny_model("qwen2_5_vl").eval()
    language, width = model.model.language_model, model.config.text_config.hidden_size
    row = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0))
    packed, again = torch.cat([row, row], 1), torch.arange(5).repeat(2)
    with torch.no_grad():
        wanted = language(inputs_embeds=row, position_ids=again[:5].expand(3, 1, 5), use_cache=False)[0][0]
        four, three = (
            language(inputs_embeds=packed, position_ids=again.expand(rows, 1, 10), use_cache=False)[0][0, 5:]
            for rows in (4, 3)
        )
    torch.testing.assert_close(four, wanted, atol=1e-4, rtol=1e-4)
    assert float((three - wanted).abs().max()) > 0.01


@relied_on("transformers", "5.24.0", "`rollout.hf` keeps its rows in a `DynamicCache`, whose layers it cuts and joins.")
def test_a_cache_has_layers_with_keys_of_rows():
    cache = DynamicCache(config=tiny_config("qwen2_5_vl").text_config)
    cache.update(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    assert cache.layers[0].keys.shape == (2, 1, 3, 4)
    assert cache.get_seq_length() == 3


@relied_on(
    "transformers",
    "5.24.0",
    "`rollout.pretrained` chooses the PIL backend by name and finds processors by these tables.",
)
def test_image_processors_have_backends():
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    assert IMAGE_PROCESSOR_MAPPING_NAMES["qwen2_vl"]["pil"] == Qwen2VLImageProcessorPil.__name__
    assert Qwen2VLImageProcessorPil().backend == "pil"


@relied_on(
    "transformers",
    "5.24.0",
    "`workers.weights` reads and writes checkpoints of older forms by transformers' conversions.",
)
def test_conversions_of_checkpoints_are_found_and_reverted():
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, revert_weight_conversion

    assert inspect.isclass(PrefixChange)
    assert {"model", "state_dict"} <= set(inspect.signature(revert_weight_conversion).parameters)
    assert isinstance(get_model_conversion_mapping(tiny_model("qwen2_5_vl")), list)

"""Operations that the host starts in a pass. Where a model is small, starting them takes longer than computing them.

An operation is one that launches a kernel: products, norms and activations by their parts, copies, gathers; no views. Counts are
those of PyTorch's dispatcher for the Llama and Qwen decoders and the SigLIP and Qwen towers, float32 on a CPU; other models, and
copies to bfloat16 and back, have more. Adapters, experts and FSDP are not counted.
"""

from typing import Any, NamedTuple

from dataproto.vlm import family_of
from workers.model.model_config import ModelConfig


class Operations(NamedTuple):
    """Of a forward pass, and of the backward pass after it."""

    forward: int
    backward: int


LAYER = Operations(48, 82)  # of a decoder layer on packed rows
BLOCK = Operations(20, 45)  # of a layer of a vision tower
BESIDES = Operations(150, 30)  # embeddings, positions, head and log-probs, once
DECODED_LAYER, DECODED_BESIDES = 36, 50  # of a decoding step of the Hugging Face engine
COMPILED = 0.3  # of the operations of a layer: products and attention stay, what is between them is joined; assumed


def learning_operations(config: Any, compute: ModelConfig, read_media: bool, tower_trained: bool) -> float:
    """Operations of a forward and a backward pass over one micro-batch.

    >>> from transformers import AutoConfig
    >>> config = AutoConfig.for_model("qwen2_5_vl")
    >>> text, vision = config.get_text_config().num_hidden_layers, config.vision_config.depth
    >>> text, vision, learning_operations(config, ModelConfig(), read_media=True, tower_trained=True)
    (80, 32, 12660.0)
    """
    again = compute.activation_checkpointing == "full"
    layer, block = (sum(each) + again * each.forward for each in (LAYER, BLOCK))
    layers = _layers(config) * layer
    if read_media:
        layers += _blocks(config) * (block if tower_trained else BLOCK.forward)
    return _joined(compute) * layers + sum(BESIDES)


def scoring_operations(config: Any, compute: ModelConfig, read_media: bool) -> float:
    """Operations of a pass without gradients over one micro-batch."""
    layers = _layers(config) * LAYER.forward + (_blocks(config) * BLOCK.forward if read_media else 0)
    return _joined(compute) * layers + BESIDES.forward


def decoding_operations(config: Any) -> int:
    """Operations of a decoding step of the Hugging Face engine, whatever the number of rows. vLLM's are replayed as a graph."""
    return _layers(config) * DECODED_LAYER + DECODED_BESIDES


def _joined(compute: ModelConfig) -> float:
    return COMPILED if compute.compile else 1.0


def _layers(config: Any) -> int:
    return int(config.get_text_config().num_hidden_layers)


def _blocks(config: Any) -> int:
    if family_of(config).vision_tower is None:
        return 0
    vision = config.vision_config
    return int(getattr(vision, "depth", None) or vision.num_hidden_layers)

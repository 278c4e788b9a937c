"""The layers that a model repeats: what transforms wrap one by one."""

from torch import nn

from workers.model.packed_model import PackedVLM


def repeated_layers(module: PackedVLM) -> list[nn.Module]:
    """Vision blocks and decoder layers, in the order in which they run."""
    family, model = module.family, module.model
    return [
        layer
        for path in (family.vision_blocks, family.decoder_layers)
        for layer in model.get_submodule(path).children()
    ]

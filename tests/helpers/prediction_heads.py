"""A random head that predicts further tokens (MTP) for a tiny model's checkpoint, and its outputs without a cache."""

import copy

import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

LAYER = "layers.0."


def add_head(model, path, per_expert=False):
    """Adds a head to the checkpoint at ``path``. Returns its weights by name."""
    text, generator = model.config.get_text_config(), torch.Generator().manual_seed(3)
    width = text.hidden_size
    shapes = {LAYER + name: weight.shape for name, weight in attending_layer(model).state_dict().items()}
    shapes |= {"fc.weight": (width, 2 * width)}
    shapes |= {f"{name}.weight": (width,) for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding", "norm")}
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    stored = dict(weights)
    for name in [name for name in weights if per_expert and "experts." in name]:
        place, _, kind = name.rpartition(".")
        kinds = ("gate", "up") if kind == "gate_up_proj" else ("down",)
        for number, expert in enumerate(stored.pop(name)):
            for each, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                stored[f"{place}.{number}.{each}_proj.weight"] = part.clone()
    file = path / "model.safetensors"
    save_file(load_file(file) | {f"mtp.{name}": tensor for name, tensor in stored.items()}, file, {"format": "pt"})
    return weights


def attending_layer(model):
    """A copy of the model's first layer with attention."""
    layers = model.model.language_model.layers
    return copy.deepcopy(next(layer for layer in layers if hasattr(layer, "self_attn")))


def head_outputs(model, weights, embeddings, states, position_ids):
    """Outputs ``(L, H)`` for pairs of ``embeddings (L, H)`` and ``states (L, H)`` at ``position_ids (3, L)``, with gradients for
    the weights.
    """
    language = model.model.language_model

    def normed(name, values):
        return functional_call(language.norm, {"weight": weights[f"{name}.weight"]}, (values,))

    pairs = torch.cat([normed("pre_fc_norm_embedding", embeddings), normed("pre_fc_norm_hidden", states)], dim=-1)
    hidden = (pairs @ weights["fc.weight"].T)[None]
    causal = torch.ones(len(embeddings), len(embeddings), dtype=torch.bool).tril()[None, None]
    of_layer = {name.removeprefix(LAYER): each for name, each in weights.items() if name.startswith(LAYER)}
    context = {"position_embeddings": language.rotary_emb(hidden, position_ids[:, None]), "attention_mask": causal}
    return normed("norm", functional_call(attending_layer(model), of_layer, (hidden,), context)[0])

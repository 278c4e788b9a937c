"""What training goes on from: a model's weights and its optimizer's state, whole, sharded or adapted, on disk."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from dataproto.errors import CheckpointError
from workers.checkpoint import load_weights_into
from workers.lora import is_adapted
from workers.mesh import Ranks
from workers.optimizer import Optimizer
from workers.packed import PackedVLM
from workers.weights import bare_copy, named_weights


def save_training_state(directory: Path, module: PackedVLM, optimizer: Optimizer, ranks: Ranks) -> None:
    """Writes ``huggingface/``, a checkpoint that `from_pretrained` reads, and what training goes on from.

    That is ``optimizer.pt`` for a whole model; for one that is sharded or adapted a distributed checkpoint ``training/``, into
    which every rank writes its own part.
    """
    if ranks.mesh is None and not is_adapted(module.model):
        module.model.save_pretrained(directory / "huggingface")
        torch.save(optimizer.state_dict(), directory / "optimizer.pt")
        return
    weights = {}
    for name, weight in named_weights(module.model):
        if ranks.first:  # the others take part and keep nothing
            weights[name] = weight.cpu()
    if ranks.first:
        bare_copy(module.model).save_pretrained(directory / "huggingface", state_dict=weights)
    checkpoint = import_module("torch.distributed.checkpoint")
    checkpoint.save(_training_state(module, optimizer), checkpoint_id=directory / "training")


def load_training_state(directory: Path, module: PackedVLM, optimizer: Optimizer, ranks: Ranks) -> None:
    """Reads what `save_training_state` wrote, to the last bit.

    Raises:
        CheckpointError: the checkpoint is missing, or of another kind of run.
    """
    if ranks.mesh is None and not is_adapted(module.model):
        load_weights_into(module.model, directory / "huggingface")
        device = next(module.parameters()).device
        optimizer.load_state_dict(torch.load(directory / "optimizer.pt", map_location=device, weights_only=True))
        return
    if not (directory / "training").is_dir():
        raise CheckpointError(f"{directory} holds no training state of a sharded or adapted model")
    checkpoint = import_module("torch.distributed.checkpoint")
    state = _training_state(module, optimizer)
    checkpoint.load(state, checkpoint_id=directory / "training")
    checkpoint.state_dict.set_state_dict(
        module,
        optimizer.adamw,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_trained_alone(),
    )
    optimizer.steps, optimizer.skipped_steps = state["steps"], state["skipped_steps"]


def _training_state(module: PackedVLM, optimizer: Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(module, optimizer.adamw, options=_trained_alone())
    counts = {"steps": optimizer.steps, "skipped_steps": optimizer.skipped_steps}
    return {"model": weights, "optimizer": moments} | counts


def _trained_alone() -> Any:
    """What is frozen comes from the model's own checkpoint."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(ignore_frozen_params=True, strict=False)

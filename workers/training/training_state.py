"""What training goes on from: a model's weights and its optimizer's state, whole, sharded or adapted, on disk.

Adam's moments and step are written for each parameter that has some, under its name: a parameter that no loss has reached yet,
as the vision tower's before the first image, has none, and goes on without. Gradients are not written.
"""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from dataproto.errors import CheckpointError
from workers.model.lora import base_name
from workers.model.named_weights import all_named_weights, meta_copy
from workers.model.packed_model import PackedVLM
from workers.ranks.failures import raise_first
from workers.ranks.mesh import Ranks
from workers.training.checkpoint_files import read_into, stored_names, write, write_behind
from workers.training.optimizer import Moments, Optimizer, new_moments


class Saving:
    """What is being written while training goes on."""

    def __init__(self) -> None:
        self._writes: list[Future[Any]] = []

    def save_all(self, directory: Path, module: PackedVLM, optimizer: Optimizer, ranks: Ranks, behind: bool) -> None:
        """Writes ``huggingface/``, a checkpoint that `from_pretrained` reads, and what training goes on from.

        That is a distributed checkpoint, ``training/``, into which every rank writes its own part, and which any other layout
        reads. With ``behind`` the state is copied to the host now and written while the caller goes on, until `finish`.
        """
        weights = {}
        for name, weight in all_named_weights(module.model, ranks):
            if ranks.is_first:  # the others take part and keep nothing
                weights[name] = weight.cpu().clone() if behind else weight.cpu()
        # First what all ranks do together: the export may fail, on the first rank alone.
        self.save_training(directory, module, optimizer, behind)
        if ranks.is_first:
            export = partial(meta_copy(module.model).save_pretrained, directory / "huggingface", state_dict=weights)
            if behind:
                self._writes.append(_EXPORTS.submit(export))
            else:
                export()

    def save_training(self, directory: Path, module: PackedVLM, optimizer: Optimizer, behind: bool) -> None:
        """Writes ``training/`` alone."""
        state = _training_state(module, optimizer, optimizer.moments)
        if behind:
            self._writes.append(write_behind(state, directory / "training"))
        else:
            write(state, directory / "training")

    def finish(self) -> None:
        """Waits until all is written; raises what went wrong."""
        writes, self._writes = self._writes, []
        wait(writes)
        raise_first([error for each in writes if (error := each.exception()) is not None])


_EXPORTS = ThreadPoolExecutor(max_workers=1, thread_name_prefix="export")


def load_training_state(directory: Path, module: PackedVLM, optimizer: Optimizer, ranks: Ranks) -> None:
    """Reads what `Saving` wrote, in this layout or another, to the last bit. Every rank calls it.

    Gradients that stand are cleared: they are of other weights.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model.
        RankFailure: another rank cannot read it.
    """
    with ranks.fail_together():
        stored = {name.rpartition(".")[0] for name in stored_names(directory / "training")}
    moments: Moments = {
        parameter: optimizer.moments.get(parameter) or new_moments(parameter)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and f"optimizer.state.{name}" in stored
    }
    state = _training_state(module, optimizer, moments)
    read_into(state, directory / "training")
    set_model_state_dict(module, state["model"], options=TRAINED_ALONE)
    optimizer.take_up(moments, state["steps"], state["skipped_steps"])


def _training_state(module: PackedVLM, optimizer: Optimizer, moments: Moments) -> dict[str, Any]:
    """What is written, or is to be read, with the moments of these parameters."""
    flat = {
        f"optimizer.state.{name}.{kind}": value
        for name, parameter in module.named_parameters()
        for kind, value in moments.get(parameter, {}).items()
    }
    counts = {"steps": optimizer.steps, "skipped_steps": optimizer.skipped_steps}
    return {"model": get_model_state_dict(module, options=TRAINED_ALONE)} | flat | counts


# What is frozen comes from the model's own checkpoint.
TRAINED_ALONE = StateDictOptions(ignore_frozen_params=True, strict=False)


def load_weights(directory: Path, module: PackedVLM, ranks: Ranks) -> None:
    """Reads the weights of what `Saving` wrote, and nothing of the optimizer. Every rank calls it.

    Weights that were frozen as it was written are not in it: they stay as they are, the model's own checkpoint's.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of another model.
        RankFailure: another rank cannot read it.
    """
    training = directory / "training"
    with ranks.fail_together():
        stored = stored_names(training)
    mine = get_model_state_dict(module)
    known = {f"model.{name}" for names in ranks.all_gather(list(mine), "pp") for name in names}
    with ranks.fail_together():
        _check_fits(training, {name for name in stored if name.startswith("model.")}, known)
    state = {"model": {name: value for name, value in mine.items() if f"model.{name}" in stored}}
    read_into(state, training)
    set_model_state_dict(module, state["model"], options=StateDictOptions(strict=False))


def _check_fits(training: Path, stored: set[str], known: set[str]) -> None:
    """Whether the weights that were written, all or those that were trained, can be those of the model whose names are known."""
    of_the_model = "model.model."  # what a checkpoint of the Hugging Face model holds as well
    added = {name for name in known if not name.startswith(of_the_model) or base_name(name) is None}
    unknown, missing = sorted(stored - known), sorted(added - stored)
    if unknown or missing:
        example = [*missing, *unknown][0].removeprefix("model.")
        raise CheckpointError(
            f"{training} is of another model: {len(unknown)} of its weights are not this model's, and {len(missing)} of this "
            f"model's are not in it, such as {example!r}"
        )

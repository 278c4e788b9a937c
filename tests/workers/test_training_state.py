"""What training goes on from, on disk: exact, for any layout, and read without running code."""

import io
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from dataproto.errors import CheckpointError
from dataproto.vlm import family_of
from helpers.tiny_models import EACH_TYPE, tiny_model
from workers.model.packed_model import PackedVLM
from workers.ranks.mesh import Ranks
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.model_worker import PolicyConfig, ReferenceWorker
from workers.training import checkpoint
from workers.training.checkpoint import Saving, _Contents, load_training_state, read_state, write_state
from workers.training.optimizer import Optimizer, OptimizerConfig

SCHEDULED = OptimizerConfig(lr=1e-2, schedule="linear", total_steps=9, warmup_steps=2)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def state() -> dict:
    return {"model": {"w": torch.arange(6.0).view(2, 3)}, "groups": [{"lr": 0.1, "names": ["w"]}], "steps": 3}


def zeros() -> dict:
    return {"model": {"w": torch.zeros(2, 3)}, "groups": [{"lr": 0.0, "names": ["w"]}], "steps": 0}


def test_tensors_and_plain_values_come_back(tmp_path):
    write_state(state(), tmp_path / "c")
    found = zeros()
    read_state(found, tmp_path / "c")
    assert torch.equal(found["model"]["w"], state()["model"]["w"])
    assert (found["groups"], found["steps"]) == (state()["groups"], 3)


@pytest.mark.parametrize("reads", [False, True])
def test_an_interrupt_is_no_damaged_file(tmp_path, monkeypatch, reads):
    """torch collects it with the errors of ranks, so that Ctrl-C ended a run as if its disk had failed."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    write_state(state(), tmp_path / "c")
    writer, reader = checkpoint.FileByFile, checkpoint.PlainReader
    monkeypatch.setattr(*((reader, "read_data") if reads else (writer, "write_data")), interrupted)
    with pytest.raises(KeyboardInterrupt):
        read_state(zeros(), tmp_path / "c") if reads else write_state(state(), tmp_path / "d")


def test_what_is_copied_to_be_written_is_let_go_of_file_by_file(tmp_path, monkeypatch):
    """Twenty views, which torch copies as it copies what is on a device; a file holds three of them."""
    views = {f"w{number}": torch.full((100, 2), float(number))[:, 0] for number in range(20)}
    size, copies, alive = views["w0"].nbytes, [], []
    save = torch.save

    def counted(value, *args, **kwargs):
        if isinstance(value, torch.Tensor):
            copies.append(weakref.ref(value))
            alive.append(sum(each().nbytes for each in copies if each() is not None))
        save(value, *args, **kwargs)

    monkeypatch.setattr(torch, "save", counted)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 3 * size)
    write_state(views, tmp_path / "c")
    assert len(alive) == 20
    assert max(alive) == 3 * size
    assert len(list((tmp_path / "c").glob("*.distcp"))) == 7
    found = {name: torch.zeros(100) for name in views}
    read_state(found, tmp_path / "c")
    assert all(torch.equal(found[name], view) for name, view in views.items())


def test_a_hostile_table_of_contents_runs_nothing(tmp_path):
    write_state(state(), tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    with pytest.raises(CheckpointError, match=r"damaged: the table of contents asks for pathlib\.\w+(\.\w+)?$"):
        read_state(zeros(), tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


class Member:
    """Pickles as ``getattr(kind, name)``, as Python 3.11.3 and older pickle members of enumerations."""

    def __init__(self, kind: object, name: str) -> None:
        self.way = kind, name

    def __reduce__(self):
        return getattr, self.way


def test_members_of_enumerations_are_read_however_they_were_written():
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    written = pickle.dumps(Member(_MEM_FORMAT_ENCODING, member.name))
    assert _Contents(io.BytesIO(written)).load() is member
    with pytest.raises(pickle.UnpicklingError, match="asks for __init__ of"):
        _Contents(io.BytesIO(pickle.dumps(Member(Metadata, "__init__")))).load()


def test_a_hostile_value_runs_nothing(tmp_path):
    write_state(state() | {"steps": Bomb(tmp_path / "exploded")}, tmp_path / "c")
    with pytest.raises(CheckpointError):
        read_state(zeros(), tmp_path / "c")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("damage", ["missing", "cut contents", "cut tensors", "other shape", "other name"])
def test_what_does_not_fit_is_one_error(tmp_path, damage):
    write_state(state(), tmp_path / "c")
    wanted = zeros()
    if damage == "missing":
        (tmp_path / "c" / ".metadata").unlink()
    elif damage == "cut contents":
        file = tmp_path / "c" / ".metadata"
        file.write_bytes(file.read_bytes()[:-20])
    elif damage == "cut tensors":
        file = next((tmp_path / "c").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-300])
    elif damage == "other shape":
        wanted["model"]["w"] = torch.zeros(5)
    else:
        wanted["model"]["other"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"training state|does not fit"):
        read_state(wanted, tmp_path / "c")


@pytest.mark.parametrize("in_background", [False, True])
def test_a_model_and_its_optimizer_go_on_to_the_last_bit(tmp_path, in_background):

    def made(seed):
        torch.manual_seed(seed)
        model = tiny_model("qwen2_5_vl")
        module = PackedVLM(model, family_of(model), 1.0)
        return module, Optimizer(module.parameters(), SCHEDULED)

    def step(module, optimizer):
        for number, parameter in enumerate(module.parameters()):
            parameter.grad = torch.full_like(parameter, 0.01 * (number % 7 - 3))
        optimizer.step()

    module, optimizer = made(0)
    step(module, optimizer)
    saving = Saving()
    saving.save_all(tmp_path, module, optimizer, Ranks(), in_background)
    saved = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    if in_background:  # training goes on while the checkpoint is written, which is of before
        step(module, optimizer)
        saving.finish()
    other, other_optimizer = made(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    load_training_state(tmp_path, other, other_optimizer, Ranks())
    for name, theirs in other.named_parameters():
        assert torch.equal(saved[name], theirs), name
    step(other, other_optimizer)
    if not in_background:
        step(module, optimizer)
    assert other_optimizer.steps == 2
    for (name, mine), theirs in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_weights_that_were_trained_are_not_left_behind_by_a_model_that_does_not_train_them(tmp_path):
    """They would be those from before their training."""
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path / "model")
    config, cpu = ActorConfig(str(tmp_path / "model"), optimizer=SCHEDULED), torch.device("cpu")
    ActorWorker(config, cpu).save(tmp_path / "trained")
    frozen = ActorWorker(replace(config, freeze_vision=True), cpu)
    frozen.save(tmp_path / "frozen")
    frozen.load(tmp_path / "frozen")
    with pytest.raises(
        CheckpointError, match=r"'model\.model\.visual.*freeze_vision.*trained/huggingface as the model"
    ):
        frozen.load(tmp_path / "trained")
    ReferenceWorker(PolicyConfig(config.model_path), cpu).model.load(tmp_path / "trained")  # reads all of them


def test_what_goes_wrong_behind_is_told_when_waited_for(tmp_path):

    model = tiny_model("qwen2_5_vl")
    module, saving = PackedVLM(model, family_of(model), 1.0), Saving()
    (tmp_path / "file").write_text("in the way")
    saving.save_all(
        tmp_path / "file", module, Optimizer(module.parameters(), OptimizerConfig()), Ranks(), in_background=True
    )
    with pytest.raises(CheckpointError, match=r"could not be written: rank 0: NotADirectoryError") as caught:
        saving.finish()
    assert "huggingface" in caught.value.__notes__[0]  # of the export, which failed as well
    saving.finish()


@pytest.mark.parametrize("model_type", EACH_TYPE)
def test_the_exported_model_is_the_trained_one_to_the_bit(tmp_path, model_type):

    model = tiny_model(model_type)
    module = PackedVLM(model, family_of(model), 1.0)
    Saving().save_all(tmp_path, module, Optimizer(module.parameters(), OptimizerConfig()), Ranks(), in_background=False)
    loaded, found = type(model).from_pretrained(tmp_path / "huggingface", output_loading_info=True)
    assert not any(names for kind, names in found.items() if kind.endswith("_keys"))
    state = loaded.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name

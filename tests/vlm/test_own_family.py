"""A family in a user's package: found by builder, engine and actor, and by other processes."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dataproto.errors import InvalidConfig, UnknownModel
from dataproto.vlm import VLMFamily, family_of, family_registry, known_families, register_family
from dataproto.vlm.families.qwen3_vl import Qwen3VL
from helpers.checkpoints import write_checkpoint
from helpers.engines import ROWS
from rollout import SamplingParams, create_engine
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses, build_requests
from workers.roles.actor import ActorConfig, ActorWorker

FAMILY = """
from dataproto.vlm.families.qwen3_vl import Qwen3VL

class MyVL(Qwen3VL):
    model_type = "my_vl"
    banned_calls = []

    def banned_ids(self, config):
        self.banned_calls.append(config.model_type)
        return super().banned_ids(config)
"""
MODEL = """
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLConfig, Qwen3VLForConditionalGeneration

class MyConfig(Qwen3VLConfig):
    model_type = "my_vl"

class MyModel(Qwen3VLForConditionalGeneration):
    config_class = MyConfig

AutoConfig.register("my_vl", MyConfig, exist_ok=True)
AutoModelForImageTextToText.register(MyConfig, MyModel, exist_ok=True)
"""
ENTRY_POINTS = '[dataproto.vlm_families]\nmy_vl = "my_package.my_family:MyVL"\n'


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder on the path with a package of a user, and no family registered before."""
    root = tmp_path / "site"
    folder = root / "my_package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "my_family.py").write_text(FAMILY)
    (folder / "my_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(family_registry, "_registered", {})
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


def install(root: Path, entry_points: str = ENTRY_POINTS, name: str = "my_package") -> None:
    """What an installer writes beside a package."""
    info = root / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points.replace('"', ""))


def renamed(checkpoint: str, target: Path) -> str:
    """The same checkpoint with the model type of the user's package."""
    write_checkpoint("qwen3_vl", target)
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "my_vl", "architectures": ["MyModel"]}))
    return str(target)


def scores(checkpoint):
    """The batch of a builder and the engine, the actor's log-probs of it, and those after an update."""
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=300)
    engine, sampling = create_engine("hf", checkpoint, device=torch.device("cpu")), SamplingParams(max_tokens=6)
    prompts = builder(ROWS)
    done = engine.generate(build_requests(prompts, sampling), sampling)
    data = attach_responses(prompts, done, sampling, builder.family, builder.pad_token_id)
    actor = ActorWorker(ActorConfig(checkpoint), torch.device("cpu"))
    data |= actor.log_probs(data, into="old_log_probs")
    actor.update(data, lambda outputs, rows: (-outputs.log_probs, {}))
    data |= actor.log_probs(data, into="new_log_probs")
    return data, (builder.family, engine.family, actor.module.family)


@pytest.mark.slow
def test_it_generates_scores_and_trains_as_the_family_it_comes_from(package, tmp_path):
    shipped = write_checkpoint("qwen3_vl", tmp_path / "shipped")
    import my_package.my_family
    import my_package.my_model

    register_family(my_package.my_family.MyVL)
    expected, _ = scores(shipped)
    data, families = scores(renamed(shipped, tmp_path / "renamed"))
    assert {type(family) for family in families} == {my_package.my_family.MyVL}
    assert my_package.my_family.MyVL.banned_calls
    for name in ("responses", "position_ids", "rollout_log_probs", "old_log_probs", "new_log_probs"):
        assert torch.equal(data[name], expected[name]), name
    assert (data["new_log_probs"] - data["old_log_probs"]).abs().max() > 0


def test_a_type_that_is_taken_is_refused_unless_replaced(package):
    class Mine(Qwen3VL):
        head = "other"

    with pytest.raises(
        InvalidConfig, match=r"'qwen3_vl' has a family already \(dataproto.vlm.families.qwen3_vl:Qwen3VL\)"
    ):
        register_family(Mine)
    assert register_family(Mine, replace=True) is Mine
    assert family_of("qwen3_vl").head == "other"
    register_family(Mine)  # once more changes nothing
    with pytest.raises(InvalidConfig, match=r"has a family already \(.*Mine\): pass replace=True"):
        register_family(Qwen3VL)


def test_the_decorator_registers(package):
    @register_family
    class Mine(Qwen3VL):
        model_type = "mine"

    assert isinstance(family_of("mine"), Mine)
    assert known_families()[-1] == "mine"


def test_what_is_no_family_is_refused(package):
    class Nameless(VLMFamily):
        pass

    class Unfinished(VLMFamily):
        model_type = "unfinished"

    for wrong, message in (
        (int, "takes a subclass of VLMFamily, not <class 'int'>"),
        (family_of("qwen3_vl"), r"takes a subclass of VLMFamily, not Qwen3VL\(\)"),
        (Nameless, "Nameless needs a class attribute `model_type`"),
        (Unfinished, "Unfinished cannot be registered: .*vision_flops"),
    ):
        with pytest.raises(InvalidConfig, match=message):
            register_family(wrong)


def test_an_installed_package_needs_no_call(package):
    with pytest.raises(UnknownModel, match=r"register_family in every process.*'dataproto\.vlm_families'"):
        family_of("my_vl")
    install(package)
    assert "my_vl" in known_families()
    assert type(family_of("my_vl")).__qualname__ == "MyVL"
    assert family_of("my_vl") is family_of("my_vl")


def test_other_processes_find_an_installed_family(package):
    install(package)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(family_of, ("my_vl",)) == family_of("my_vl")
    code = "from dataproto.vlm import family_of; print(family_of('my_vl'))"
    path = {"PYTHONPATH": f"{package}:{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert done.stdout == "MyVL()\n"


@pytest.mark.parametrize(
    ("entry_point", "message"),
    [
        ("my_package.absent:MyVL", "family my_package.absent:MyVL of model type 'my_vl' cannot be imported"),
        ("my_package.my_family:Absent", "cannot be imported: .*Absent"),
        (
            "dataproto.vlm.families.qwen3_vl:Qwen3VL",
            "names dataproto.vlm.families.qwen3_vl:Qwen3VL, whose model_type is 'qwen3_vl'",
        ),
    ],
)
def test_a_wrong_entry_point_is_named(package, entry_point, message):
    install(package, f"[dataproto.vlm_families]\nmy_vl = {entry_point}\n")
    with pytest.raises(InvalidConfig, match=message):
        family_of("my_vl")


def test_two_packages_for_one_type_are_named(package):
    install(package)
    install(package, ENTRY_POINTS.replace("MyVL", "Other"), "other_package")
    with pytest.raises(
        InvalidConfig, match=r"several families for model type 'my_vl': my_package\.my_family:.* and my_package"
    ):
        family_of("my_vl")

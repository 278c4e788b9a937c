"""The batch alone needs few packages; what needs more names the extra that installs it."""

import subprocess
import sys

import pytest

from dataproto.errors import MissingPackage

# A process in which packages cannot be imported, as if they were not installed.
WITHOUT = """
import importlib.abc, importlib.machinery, sys
refused = set(sys.argv[1].split(","))
sys.argv = sys.argv[1:]
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in refused else found(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""
NOT_OF_THE_BATCH = (
    "transformers,datasets,mathruler,pylatexenc,yaml,rich,tensorboard,qwen_vl_utils,ray,vllm,peft,tinker,hypothesis"
)


def run_without(packages: str, code: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", WITHOUT + code, packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_batch_packs_splits_and_saves_with_the_five_packages_of_the_core_alone(tmp_path):
    code = f"""
import torch
from dataproto import DataProto
data = DataProto.from_dict({{"ids": torch.arange(6).view(3, 2)}}, non_tensors={{"uid": ["a", "b", "c"]}})
data.save_to_disk({str(tmp_path / "batch")!r})
assert (DataProto.load_from_disk({str(tmp_path / "batch")!r})["ids"] == data["ids"]).all()
import dataproto.vlm, dataproto.tensordict_utils, rollout
"""
    done = run_without(NOT_OF_THE_BATCH, code)
    assert done.returncode == 0, done.stderr


def test_what_lacks_its_extra_names_it():
    code = """
from dataproto.errors import MissingPackage
def show(call):
    try:
        call()
    except MissingPackage as error:
        print(error)
for name in ("workers", "recipes", "rollout.prompts", "rollout.hf"):
    show(lambda: __import__(name))
from rollout.engine import create_engine
show(lambda: create_engine("hf", "nowhere"))
show(lambda: create_engine("vllm", "nowhere"))
"""
    assert run_without("transformers,vllm", code).stdout.splitlines() == [
        "workers needs transformers: pip install 'dataproto-vlm[train]'",
        "recipes needs transformers: pip install 'dataproto-vlm[train]'",
        "rollout.prompts needs transformers: pip install 'dataproto-vlm[train]'",
        "rollout.hf needs transformers: pip install 'dataproto-vlm[train]'",
        "engine 'hf' needs transformers: pip install 'dataproto-vlm[train]'",
        "engine 'vllm' needs vllm: pip install 'dataproto-vlm[vllm]'",
    ]


def test_a_run_on_ray_without_ray_names_the_extra(monkeypatch):
    from workers import ActorConfig, launch

    monkeypatch.setattr("dataproto.extras.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match=r"on='ray' needs ray: pip install 'dataproto-vlm\[ray\]'"):
        launch(actor=ActorConfig("nowhere"), on="ray")


def test_a_command_without_its_engine_ends_before_anything_is_written_or_loaded(tmp_path):
    grpo = ["grpo", "--engine", "vllm", "--output-dir", str(tmp_path / "out")]
    serve = ["serve", "--sampler", "vllm", "--state", str(tmp_path / "state")]
    done = run_without("vllm", f"from recipes.commands import main; sys.exit(main({grpo!r}) + main({serve!r}))")
    needs = "needs vllm: pip install 'dataproto-vlm[vllm]'"
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.splitlines() == [f"error: engine 'vllm' {needs}", f"error: --sampler vllm {needs}"]
    assert list(tmp_path.iterdir()) == []


def test_a_running_cluster_may_have_an_engine_that_the_driver_lacks(monkeypatch):
    from workers.cluster.launcher import check_extras

    monkeypatch.setattr("dataproto.extras.find_spec", lambda name: None if name == "vllm" else name)
    check_extras("vllm", "ray", address="auto")
    with pytest.raises(MissingPackage, match="needs vllm"):
        check_extras("vllm", "ray")


def test_a_recipe_without_its_extra_ends_with_one_line():
    done = run_without("yaml,rich", "import runpy; runpy._run_module_as_main('recipes.geo3k_grpo')")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "recipes needs yaml, rich: pip install 'dataproto-vlm[train]'" in line


def test_the_server_without_its_extra_ends_with_one_line(tmp_path):
    code = f"from recipes.commands import main; sys.exit(main(['serve', '--state', {str(tmp_path)!r}]))"
    done = run_without("starlette,uvicorn", code)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "error: dataproto serve needs starlette, uvicorn: pip install 'dataproto-vlm[serve]'",
    )

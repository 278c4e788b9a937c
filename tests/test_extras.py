"""The batch alone needs few packages; what needs more names the extra that installs it."""

import subprocess
import sys

import pytest

# A process in which packages cannot be imported, as if they were not installed.
WITHOUT = """
import importlib.abc, importlib.machinery, sys
refused = set(sys.argv[1].split(","))
sys.argv = sys.argv[1:]
found = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in refused else found(name, path, target)
importlib.machinery.PathFinder.find_spec = find_spec
"""
NOT_OF_THE_BATCH = (
    "transformers,datasets,mathruler,pylatexenc,tyro,rich,tensorboard,qwen_vl_utils,ray,vllm,peft,tinker,hypothesis"
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


@pytest.mark.parametrize("package", ["workers", "recipes", "rollout.prompts", "rollout.hf"])
def test_a_package_without_its_extra_names_it(package):
    done = run_without("transformers", f"import {package}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"dataproto.errors.MissingPackage: {package} needs transformers: pip install 'dataproto-vlm[train]'"


def test_a_recipe_without_its_extra_ends_with_one_line():
    code = "import runpy; runpy._run_module_as_main('recipes.geo3k_grpo')"
    done = run_without("tyro,rich", code)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert "recipes needs tyro, rich: pip install 'dataproto-vlm[train]'" in line


@pytest.mark.parametrize(
    ("packages", "code", "message"),
    [
        (
            "vllm",
            "from rollout.engine import make_engine; make_engine('vllm', 'nowhere')",
            "vllm: pip install 'dataproto-vlm[vllm]'",
        ),
        (
            "ray",
            "from workers import launch, ActorConfig; launch(actor=ActorConfig('nowhere'), on='ray')",
            "ray: pip install 'dataproto-vlm[ray]'",
        ),
    ],
)
def test_a_backend_without_its_extra_names_it(packages, code, message):
    done = run_without(packages, code)
    assert done.returncode == 1
    assert message in done.stderr.strip().splitlines()[-1]

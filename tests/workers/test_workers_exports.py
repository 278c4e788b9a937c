"""What `workers` and its rooms offer, what importing them does not load, and what changes modules of other libraries."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import workers
from workers.model import patches

EXPORTS = {
    "workers": [
        *(
            "ActorConfig",
            "ActorWorker",
            "AdamParams",
            "CriticConfig",
            "CriticWorker",
            "Layout",
            "LossFn",
            "OptimizerConfig",
            "Outputs",
        ),
        *("PackedVLM", "PolicyConfig", "ReferenceWorker", "RewardFunction", "RewardRow", "RewardWorker", "Roles"),
        *("RolloutConfig", "RolloutWorker", "ShardingManager", "launch"),
    ],
    "workers.parallel": ["TRANSFORMS", "Transform", "parallelize"],
}

SOURCES = sorted(Path(workers.__file__).parent.rglob("*.py"))
ROOT = Path(workers.__file__).parent.parent
PATCHES = Path(patches.__file__)


@pytest.mark.parametrize("package", EXPORTS)
def test_a_package_exports_exactly_this(package: str) -> None:
    module = import_module(package)
    assert sorted(module.__all__) == sorted(EXPORTS[package])
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_loads_neither_engines_nor_ray_nor_schedules() -> None:
    heavy = ["ray", "vllm", "peft", "tinker", "datasets", "torch.distributed.pipelining"]
    program = f"import sys; from workers import *; print(sorted(set({heavy}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_other_libraries_modules_are_changed_in_one_file_alone() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES if path != PATCHES for line in changing_lines(path)]
    assert found == []


def test_every_change_of_another_librarys_modules_has_its_reason() -> None:
    """Its docstring has an entry for each module that imports its functions, and for no other."""
    users = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == patches.__name__
    }
    assert users == set(re.findall(r"^- `(workers[\w.]+)`: ", str(patches.__doc__), re.MULTILINE))


OWN = {"self", "cls", "ctx", "error", "selective_contexts"}
"""Names whose attributes belong to this package: instances, contexts of autograd functions, errors that it raises, a function."""

SLOTS = {"tokens", "features", "score", "running", "replays_routing", "kept"}
"""Attributes of this package's own modules that transforms, stages and roles set by design."""

DATA = {"grad", "batch", "meta_info", "dispatch", "generation_config", "storage_meta", "load_id", "environ"}
"""Attributes that hold data, not code, of whatever object."""

RAY_SWITCH = "ENABLE_RAY_CLUSTER"
"""Set in the one file that knows Ray, which says why."""


def changing_lines(path: Path) -> list[int]:
    """Lines that assign to an attribute of something else than this package's own objects, or register a hook."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("setattr", "delattr") or (name.startswith("register_") and name.endswith("_hook")):
                lines.append(node.lineno)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            if not isinstance(target, ast.Attribute) or target.attr in SLOTS | DATA | {RAY_SWITCH}:
                continue
            if not (isinstance(target.value, ast.Name) and target.value.id in OWN):
                lines.append(node.lineno)
    return lines

"""What the packages offer, and what importing them does not load."""

import subprocess
import sys

import pytest

import rollout
import rollout.hf
import rollout.prompts
import rollout.vllm
from rollout.engine import ENGINES


@pytest.mark.parametrize(
    ("package", "names"),
    [
        (rollout, ["Completion", "Request", "RolloutEngine", "SamplingParams", "create_engine"]),
        (rollout.hf, ["AdapterEngine", "HFEngine"]),
        (rollout.vllm, ["VLLMAdapterEngine", "VLLMEngine"]),
        (
            rollout.prompts,
            [
                *("ChunkRenderer", "PlacedSequence", "ProcessedImage", "Prompt"),
                *("PromptBuilder", "SupervisedBuilder", "TokenSequence", "TrainingRow", "Turns"),
                *("images_by_content", "invalid_row", "row_digest", "row_number"),
            ],
        ),
    ],
    ids=lambda value: value.__name__ if hasattr(value, "__path__") else "",
)
def test_a_package_exports_exactly_this(package, names):
    assert sorted(package.__all__) == names
    assert all(hasattr(package, name) for name in names)


def test_importing_loads_no_heavy_library():
    packages = [
        "dataproto.chunks",
        "rollout",
        "rollout.adapters",
        "rollout.prompts",
        "rollout.responses",
        "rollout.vllm",
    ]
    program = f"""
import sys
from importlib import import_module
for package in {packages}:
    import_module(package)
    print(package, sorted({{'ray', 'vllm', 'transformers', 'tinker', 'pydantic'}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{package} []" for package in packages]


def test_engines_are_named_by_the_packages_that_export_them():
    assert ENGINES == {"hf": "rollout.hf:HFEngine", "vllm": "rollout.vllm:VLLMEngine"}

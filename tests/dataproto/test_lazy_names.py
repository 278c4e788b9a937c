"""Names of packages that are imported when they are used: what an import loads, and what stays as it was."""

import subprocess
import sys

import pytest

import dataproto


def test_a_module_loads_no_neighbour_the_package_no_heavy_library_and_a_name_is_the_same_object() -> None:
    program = """
import sys
import dataproto.errors, workers.ranks.layout, workers.model.model_config, rollout.engine, recipes.algorithms.options
assert not {"torch", "tensordict", "transformers"} & set(sys.modules)
from dataproto import DataProto
from dataproto.protocol import DataProto as same
assert DataProto is same is sys.modules["dataproto"].__dict__["DataProto"]
from dataproto import *
from dataproto.vlm import family_of, known_families
assert all(family_of(name) for name in known_families())
assert not {"ray", "vllm", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_unknown_name_is_an_attribute_error_that_names_the_package() -> None:
    with pytest.raises(AttributeError, match="No dataproto attribute DataPorto"):
        dataproto.DataPorto  # noqa: B018
    with pytest.raises(ImportError, match="DataPorto"):
        from dataproto import DataPorto  # noqa: F401

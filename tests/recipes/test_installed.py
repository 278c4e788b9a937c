"""The command as users have it: installed by pip, and started where folders and files have the names of our packages."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from helpers.checkpoints import write_checkpoint
from helpers.option_files import in_files
from recipes.commands import COMMANDS

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PACKAGES = ("dataproto", "rollout", "workers", "recipes", "dataproto_server")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A new environment with this project, installed from a copy of its source, beside the packages that the tests run with."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source / name)
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", str(environment), cwd=folder)
    python = environment / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(environment)})
    others = [path for path in sys.path if path.endswith("site-packages") and Path(path) != Path(purelib)]
    Path(purelib, "others.pth").write_text(
        "\n".join(others)
    )  # their own .pth files, and so an editable project, are left out
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "--quiet", str(source), cwd=folder)
    shutil.rmtree(source)
    return environment / "bin" / "dataproto"


@pytest.fixture
def shadowed(tmp_path) -> Path:
    """A working directory whose folders and files would end the program if they were imported."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('{name} of the working directory')")
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory')")
    return tmp_path


def run(*command: str, cwd: Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=280)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def test_nothing_in_the_working_directory_takes_the_place_of_an_installed_command(installed, shadowed):
    told = run(str(installed), "--help", cwd=shadowed).stdout
    assert [line.split()[0] for line in told.splitlines() if line.startswith("  ")] == list(COMMANDS)
    for name in COMMANDS:
        assert run(str(installed), name, "--help", cwd=shadowed).stdout.startswith(f"usage: dataproto {name}")
    plan = run(str(installed), "plan", "sft", "--device", "h200", "--steps", "3", cwd=shadowed).stdout
    assert "run: 3 steps" in plan
    module = run(str(installed.with_name("python")), "-m", "recipes", "show", "--help", cwd=shadowed, check=False)
    assert "of the working directory" in module.stderr


@pytest.mark.long
def test_nothing_in_the_working_directory_takes_the_place_of_a_package_in_rays_processes(installed, shadowed):
    """Ray puts the working directory first into the search path of its processes."""
    model = write_checkpoint("qwen2_5_vl", shadowed / "model")
    options = (
        "--batch-size 2 --algorithm.n 2 --max-prompt-length 500 --max-response-length 4 --eval-rows 2 --steps 1"
        " --eval-first false --on ray --layout.dp 2 --ray.object-store-gib 0.2 --output-dir out"
    )
    done = run(
        str(installed),
        "grpo",
        "--preset",
        "any",
        "--model-path",
        str(model),
        *in_files(options.split(), shadowed),
        cwd=shadowed,
    )
    assert "report: out/report.html" in done.stdout

"""The command ``dataproto``: its table, and that nothing in the working directory takes its place."""

import contextlib
import importlib
import logging
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from recipes.commands import COMMANDS, main, places
from recipes.commands.import_warnings import TORCHAO_ENUMS, silence
from recipes.options import exit_status

ROOT = Path(__file__).parents[2]
SCRIPT = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules))
from {module} import {function}
if __name__ == "__main__":
    sys.exit({function}())
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_function_of_a_module(name):
    for module, function in zip(places(name), ("main", "parse"), strict=True):
        assert module is None or callable(getattr(importlib.import_module(module), function))
    assert COMMANDS[name]


HELP_OF_ALL = """
import contextlib, io, sys
from recipes.commands import COMMANDS, main
for name in COMMANDS:
    for option in ("--help", "--help-all"):
        with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
            main([name, option])
        assert told.getvalue().startswith(f"usage: dataproto {name}"), name
assert main(["grpo", "--stpes", "5"]) == 2
print(sorted({"torch", "transformers", "tensordict", "datasets", "huggingface_hub", "ray", "vllm"} & set(sys.modules)))
"""


def test_help_and_mistakes_of_all_commands_load_no_heavy_library():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_that_help_shows_has_a_text(name, capsys):
    with contextlib.suppress(SystemExit):
        main([name, "--help-all"])
    lines = capsys.readouterr().out.splitlines()
    shown = [number for number, line in enumerate(lines) if line.startswith("  ") and line[2] != " "]
    assert shown
    entries = [" ".join(lines[at : at + 2]) if lines[at][2:].find("  ") < 0 else lines[at] for at in shown]
    assert [entry for entry in entries if not re.search(r"\S {2,}\S", entry)] == []


@pytest.mark.parametrize("arguments", [["--help"], ["grpo", "--help-all"]])
def test_a_reader_that_ends_before_the_help_is_no_error(arguments, monkeypatch, capsys):
    """As ``dataproto grpo --help-all | head``."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with contextlib.suppress(SystemExit):
            assert main(arguments) == 0
    assert capsys.readouterr().err == ""


def test_what_is_no_command_is_refused_with_the_nearest(capsys):
    assert main(["gropo"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'gropo': did you mean grpo?\n"
    assert main(["make-vlm"]) == 2
    assert "'make-vlm': train a small published model" in capsys.readouterr().err
    assert main(["kto"]) == 2
    assert "'kto': it is a loss of dpo, dataproto dpo --algorithm.loss kto\n" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert all(f"  {name} " in capsys.readouterr().out for name in ["grpo"])


def test_the_arguments_reach_the_command(tmp_path, capsys):
    assert main(["view", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_folder_named_recipes_does_not_shadow_the_command_and_help_loads_no_torch(tmp_path):
    """The script is what an installer makes of the entry point: its own folder, not the working directory, is searched."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["dataproto"]
    module, _, function = entry.partition(":")
    script = tmp_path / "bin" / "dataproto"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(module=module, function=function))
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "__init__.py").write_text("raise SystemExit('shadowed')")

    def run(*command: str) -> "subprocess.CompletedProcess[str]":
        paths = [path for path in sys.path if path and Path(path).resolve() != tmp_path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}
        return subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250
        )

    told = run(str(script), "--help")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage: dataproto COMMAND")
    assert told.stdout.splitlines()[-1] == "False"
    assert run("-m", "recipes", "show", "--help").stderr.strip() == "shadowed"


def test_the_package_is_run_as_the_command_and_a_recipe_is_not():
    """A module of a recipe would end without a word."""

    def run(*module: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-m", *module], cwd=ROOT, capture_output=True, text=True, timeout=250)

    assert run("recipes", "--help").stdout.startswith("usage: dataproto COMMAND")
    ended = run("recipes.grpo", "--steps", "1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "error: python -m recipes.grpo has ended: run dataproto NAME, or python -m recipes NAME\n"


@pytest.mark.parametrize("words", [["-mrecipes.grpo"], ["-Im", "recipes.sft"], ["recipes/grpo.py"]], ids=" ".join)
def test_a_recipe_says_how_to_run_it_however_it_is_started(words):
    done = subprocess.run(
        [sys.executable, *words, "--steps", "1"], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: python ")
    assert done.stderr.endswith("has ended: run dataproto NAME, or python -m recipes NAME\n")


LOADING = "Failed to load _C_cutlass_90a.abi3.so: Could not load this library"


@pytest.mark.parametrize(
    ("name", "level", "text", "cuda", "shown"),
    [
        ("torchao", logging.WARNING, LOADING, None, False),
        ("torchao", logging.WARNING, LOADING, "13.0", True),
        ("torchao", logging.ERROR, LOADING, None, True),
        (
            "torchao",
            logging.WARNING,
            "Skipping import of cpp extensions due to incompatible torch version.",
            None,
            True,
        ),
        ("torch.utils._pytree", logging.WARNING, TORCHAO_ENUMS[0] + " is an Enum subclass and is now", "13.0", False),
        ("torch.utils._pytree", logging.WARNING, "<enum 'X'> is an Enum subclass and is now supported", "13.0", True),
        ("torch.utils._pytree", logging.WARNING, "X is already registered", None, True),
    ],
)
def test_a_command_leaves_out_warnings_of_imports_that_no_user_can_act_on(monkeypatch, name, level, text, cuda, shown):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(logging.getLogger(name), "filters", [])
    silence()
    silence()
    assert len(logging.getLogger(name).filters) == 1
    record = logging.getLogger(name).makeRecord(name, level, "file.py", 1, text, (), None)
    assert bool(logging.getLogger(name).filter(record)) == shown


@pytest.mark.torchao
@pytest.mark.skipif(torch.version.cuda is not None, reason="beside a torch for CUDA, torchao can load its libraries")
def test_torchao_is_imported_without_a_word_on_a_cpu():
    program = "from recipes.commands.import_warnings import silence; silence(); import torchao"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stderr == ""


def test_an_interrupt_while_modules_are_imported_is_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("recipes.commands.importlib.import_module", interrupted)
    assert main(["view", "outputs/x"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize(
    ("arguments", "resumes", "says"),
    [
        (["--steps", "3"], True, "with --resume to continue"),
        (["--overwrite"], True, "with --resume instead of --overwrite to continue"),
        ([], False, "interrupted\n"),
    ],
)
def test_an_interrupt_says_how_to_go_on_where_that_is_possible(capsys, arguments, resumes, says):
    with exit_status(arguments, resumes) as status:
        raise KeyboardInterrupt
    told = capsys.readouterr().err
    assert status.code == 130
    assert says in told
    assert ("--resume" in told) == resumes


def test_the_version_of_a_tree_that_is_not_installed_is_an_error_in_one_line(monkeypatch, capsys):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("recipes.commands.version", missing)
    assert main(["--version"]) == 2
    assert "dataproto-vlm is not installed" in capsys.readouterr().err

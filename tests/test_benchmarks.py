"""Benchmarks: programs take the commands that documents name, each runs at its smallest size, and the README's figures hold."""

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.measured import TABLE, changed, held
from benchmarks.random_checkpoint import write
from rollout.pretrained import has_stored

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
COMMAND = re.compile(r"benchmarks/(\w+)\.py((?:\s.*)?)", re.DOTALL)
"""A program's name and its arguments."""


def commands(text: str) -> list[tuple[str, ...]]:
    """Program and arguments of each benchmark that ``text`` names as code. Options that follow as "and `--options`" or
    "with `--options`", in the same paragraph, are of the last program."""
    found: list[tuple[str, ...]] = []
    for paragraph in text.split("\n\n"):
        name = None
        for word, code in re.findall(r"(\w*)\s?`([^`]+)`", paragraph):
            match = COMMAND.search(code)
            if match or not code.startswith("--"):
                name = match and match[1]
            elif word not in ("and", "with"):
                continue
            if name and (ROOT / "benchmarks" / f"{name}.py").exists():
                found.append((name, *shlex.split((match[2] if match else code).replace(" [", " ").rstrip("]"))))
    return found


NAMED = sorted({command for path in DOCUMENTS for command in commands(path.read_text(encoding="utf-8"))})


class Parsed(Exception):
    """The arguments were read, and nothing has been run."""


def test_commands_are_read_with_the_options_that_follow():
    text = (
        "`OMP_NUM_THREADS=1 python benchmarks/log_probs.py\n--tokens 8` and `--hidden 4`, for `--all`\n\nand `--other`"
    )
    assert commands(text) == [("log_probs", "--tokens", "8"), ("log_probs", "--hidden", "4")]


@pytest.mark.parametrize("command", NAMED, ids=" ".join)
def test_a_program_takes_the_arguments_that_documents_name(command, monkeypatch):
    path = ROOT / "benchmarks" / f"{command[0]}.py"
    if "parse_args" not in path.read_text(encoding="utf-8"):
        assert not [argument for argument in command[1:] if argument.startswith("-")]
        return
    parse_args = argparse.ArgumentParser.parse_args

    def parse_only(self, *arguments, **options):
        parse_args(self, *arguments, **options)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr("sys.argv", [str(path), *command[1:]])
    monkeypatch.setattr("sys.path", [str(path.parent), *sys.path])
    for module in re.findall(r"^from (verl[.\w]*) import", path.read_text(encoding="utf-8"), re.MULTILINE):
        monkeypatch.setitem(sys.modules, module, mock.MagicMock())  # which is in an environment of its own
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")


SMALLEST = """
adapters
agents overhead --conversations 4 --times 1
agents learning --work WORK/agents --recipes walk --steps 1
answer_checkers
busy_machine --rounds 1 --steps 1
carried_decoding --size tiny --engine hf --prompts 4 --max-tokens 16 --steps 1
dataproto --rows select --repeats 1
curriculum --work WORK/curriculum --seeds 0 --steps 2 --every 1 --taught 1 --problems 4 4 4 4 --eval-rows 4 4 4 4
preferences --work WORK/preferences --runs reward-model --steps 1
dpo_step --steps 1 --warmup 1 --pairs 2 --compared 2
distil --teacher-steps 1 --start 1 --steps 1 --prompts 4 --samples 2 --rows 4 --seeds 0
environment_latency --episodes 4 --turns 2 --turn-tokens 4 --rounds 1
forecasts
geo3k_step --gpus 2 --size tiny --engine hf --prompts 8 --minibatch 8 --max-tokens 32 --steps 1 --lora-rank 0 4
geo3k_step --gpus 2 --size tiny --engine hf --prompts 8 --minibatch 8 --max-tokens 32 --steps 1 --staleness 0 1
grpo_step --steps 1 --warmup 1 --prompts 2 --samples 2 --max-tokens 4
head_acceptance --work WORK/head --seeds 0 --steps 1 --fitted 1 --warmed 2
host_speed
import_time
learning --work WORK/learning --algorithms level1/grpo --seeds 0 --steps 1
learning_starts --level 2 --output WORK/start --batch-size 4 --every 1 --seconds 1 --read-seconds 1
log_probs --tokens 64 --hidden 32 --vocabulary 128
measured
pass_levers --device cpu --size tiny --prompts 2 --samples 2 --steps 1 --warmup 0
phase_memory 7b-dp2 --device cpu
random_checkpoint tiny WORK/checkpoint
ray_traffic --prompts 2 --samples 2 --pixels 56 --steps 1
serve_rates load --samples 4 --passes 4 --repeats 1 --warmup 0
serve_tenants --size tiny --sampler hf --prompts 8 --samples 2 --max-tokens 8 --steps 1 --model WORK/model --output WORK/tenants
simulated_steps
synthetic_levels --problems 1 1 1 1 --output WORK/problems
train_step --device cpu --size tiny --prompts 2 --samples 2 --steps 1 --warmup 0
walk_beside_trl --work WORK/walk --runs walk agent --seeds 0 --steps 1
wire_bytes --rows 4 --prompt 8 --longest 64 --mean 16
""".strip().splitlines()
"""Each program that runs on a CPU, at its smallest size."""

NOT_RUN = {
    "attention": "needs CUDA",
    "draft_speed": "needs vLLM",
    "rollout": "needs vLLM",
    "trace_summary": "needs a trace of a GPU; tests/workers/test_trace_summary.py makes one up",
    "verl_traffic": "needs verl",
    "trl_dpo_step": "needs TRL",
    "trl_grpo_step": "needs TRL",
    "trl_learning": "needs TRL",
    "trl_walk": "needs TRL",
    "walk_by_verifiers": "needs verifiers",
} | dict.fromkeys(
    (
        "dataproto_rows",
        "engine_weights",
        "label_reading",
        "served_processes",
        "store_traffic",
        "synthetic_figures",
        "walk_agents",
        "workload",
    ),
    "is no program",
)


def test_each_benchmark_is_run_or_it_is_said_why_not():
    run = {command.split()[0] for command in SMALLEST}
    assert run.isdisjoint(NOT_RUN)
    assert run | set(NOT_RUN) == {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", SMALLEST)
def test_a_benchmark_runs_at_its_smallest_size(command, tmp_path):
    name, *arguments = command.replace("WORK", str(tmp_path)).split()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    program = [sys.executable, f"benchmarks/{name}.py", *arguments]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("weights", [True, False])
def test_a_random_checkpoint_of_qwen3_5_has_the_head_that_the_benchmark_of_drafts_times(tmp_path, weights):
    path = write(tmp_path / "checkpoint", "tiny-qwen3.5", weights)
    assert has_stored(str(path), "mtp.")
    assert has_stored(str(path), "model.") is weights
    assert json.loads((path / "config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1


def test_each_row_of_the_readme_names_its_date_command_and_files():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| work | a peer |")[2].partition("\n\n")[0]
    shown = [line.removeprefix("| ") for line in table.splitlines()[2:]]
    rows = list(tomllib.loads(TABLE.read_text(encoding="utf-8")).values())
    assert [line for line, row in zip(shown, rows, strict=True) if not line.startswith(row["row"])] == []
    for row in rows:
        assert row.keys() - {"commit"} == {"digest", "row", "measured", "command", "files"}


def test_the_figures_of_the_readme_hold_for_the_files_that_they_time():
    assert changed(TABLE.read_text(encoding="utf-8")) == {}


def test_a_row_holds_until_a_file_that_it_times_changes_and_again_once_somebody_says_so(tmp_path):
    table = "".join(f'[{name}]\ndigest = ""\ncommand = "time it"\nfiles = ["{name}"]\n' for name in ("a.py", "b"))
    table = table.replace("[a.py]", "[a]")
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.py").write_text("2")
    assert changed(table, tmp_path).keys() == {"a", "b"}
    table = held(table, ["a", "b"], tmp_path)
    assert changed(table, tmp_path) == {}
    (tmp_path / "b" / "c.py").write_text("3")
    assert list(changed(table, tmp_path)) == ["b"]
    assert "time it" in changed(table, tmp_path)["b"]
    assert changed(held(table, ["b"], tmp_path), tmp_path) == {}
    (tmp_path / "b" / "c.py").rename(tmp_path / "b" / "d.py")
    assert list(changed(held(table, ["a"], tmp_path), tmp_path)) == ["b"]

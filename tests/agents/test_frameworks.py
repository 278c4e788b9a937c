"""Agents of six frameworks as they come from PyPI, in processes of their own: what they send becomes rows of sampled tokens."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.agents import TOOL_TEMPLATE, checked_rows, sampled_as_told
from helpers.checkpoints import write_checkpoint
from helpers.engines import write_published
from rollout.agents import CommandAgent
from rollout.engine import SamplingParams
from rollout.hf import engine as hf_engine
from rollout.prompts import PromptBuilder
from workers.roles.actor import ActorConfig, ActorWorker
from workers.roles.rollout_worker import RolloutConfig, RolloutWorker

HERE = Path(__file__).parent / "frameworks"
NEW_ROWS = {"smolagents": ["", "client_text", "client_text"]}  # it writes calls into its text
ROOM = 1 << 14
NAMES = sorted(path.stem.removeprefix("by_") for path in HERE.glob("by_*.py"))


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """That of an environment with the pinned frameworks; AGENT_FRAMEWORKS_PYTHON names one that is there already."""
    wanted = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line]
    if (found := os.environ.get("AGENT_FRAMEWORKS_PYTHON")) is None:
        folder = tmp_path_factory.mktemp("frameworks")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        found = str(folder / "bin" / "python")
        subprocess.run([found, "-m", "pip", "install", "--quiet", "-r", HERE / "requirements.txt"], check=True)
    listed = subprocess.run([found, "-m", "pip", "list", "--format", "json"], check=True, capture_output=True)
    versions = {each["name"]: each["version"] for each in json.loads(listed.stdout)}
    assert wanted == [re.sub(r"==.*", f"=={versions[re.split(r'[=[]', line)[0]]}", line) for line in wanted]
    return found


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def roles(request, tmp_path_factory):
    """An actor, a rollout worker on an engine, the builder of prompts, and the module in which the engine samples."""
    folder = tmp_path_factory.mktemp("model")
    path, options, sampler = write_checkpoint("qwen2_5_vl", folder / "actor"), {}, hf_engine
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=ROOM)
    builder.tokenizer.chat_template = TOOL_TEMPLATE
    places = [path]
    if request.param == "vllm":
        from rollout.vllm import sampler

        places.append(write_published("qwen2_5_vl", folder / "engine"))
        options = {"max_num_seqs": 8, "max_model_len": ROOM, "max_images": 8, "kv_cache_bytes": 1 << 27}
        options["image_options"] = builder.image_options
    for place in places:
        config = Path(place, "config.json")  # with room for the instructions of frameworks
        config.write_text(re.sub(r'("max_position_embeddings": )\d+', rf"\g<1>{ROOM}", config.read_text()))
        builder.tokenizer.save_pretrained(place)
    actor = ActorWorker(ActorConfig(path), torch.device("cpu"))
    rollout = RolloutWorker(RolloutConfig(places[-1], request.param, options), lambda dtype: actor.named_weights())
    return actor, rollout, builder, sampler


def two_looks(builder, request):
    """What the policy says in an episode of three turns: two looks, and an answer."""
    prompt, pictures = builder.tokenizer.decode(request.prompt_ids), len(request.multi_modal_data.get("image", ()))
    name, arguments = "look", {"b": pictures, "a": "x"}
    if pictures == 2 and "final_answer" in prompt:
        name, arguments = "final_answer", {"answer": "red"}
    text = f'Let me look.\n<tool_call>\n{{"name": "{name}",  "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    if pictures == 2 and name == "look":
        text = "It is red."
    return text.partition("<tool_call>\n")[2] if prompt.endswith("<tool_call>\n") else text


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_framework_as_it_is_has_rows_of_sampled_tokens(python, roles, name):
    actor, rollout, builder, sampler = roles
    prompts = builder([{"prompt": "Which colour is it?", "uid": "u"}])
    sampling = SamplingParams(n=2, max_tokens=200, seed=3)
    agent = CommandAgent(f"{python} {HERE / f'by_{name}.py'}")
    with sampled_as_told(builder, partial(two_looks, builder), sampler):
        data, recorder = checked_rows(actor, rollout, prompts, agent, sampling, turns=6, seconds=200)
    assert set(data["end_reason"]) == {"done"}, list(data["end_message"])
    reasons = NEW_ROWS.get(name, [""])
    assert data["new_row"].tolist() == 2 * reasons
    assert data["score"].tolist() == [1.0] * len(data)
    assert [info["looks"] for info in data["info"]] == [2] * len(data)
    assert len(recorder.done) == 2 * 3
    assert [len(media["image"]) for media in data["multi_modal_data"][len(reasons) - 1 :: len(reasons)]] == [2, 2]

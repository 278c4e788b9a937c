"""Environments of other libraries, as they come from PyPI, as agents: each library in an environment of its own."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

HERE, ROOT = Path(__file__).parent / "environments", Path(__file__).parents[2]


@pytest.fixture
def python_with(tmp_path):
    """The Python of an environment with a package, over those of the tests; VERIFIERS_PYTHON, say, names one that is there."""

    def made(requirement):
        if found := os.environ.get(f"{requirement.partition('==')[0].upper()}_PYTHON"):
            return found
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
        own = sysconfig.get_path("purelib", vars={"base": str(tmp_path / "environment")})
        others = [path for path in sys.path if path.endswith("site-packages")]
        Path(own, "others.pth").write_text("\n".join(others))
        python = str(tmp_path / "environment" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", requirement], check=True)
        return python

    return made


def told_by(python, script, *arguments):
    """What a script prints in its last line, as JSON."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "docs", HERE)))
    given = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([python, HERE / script, *arguments], capture_output=True, text=True, timeout=900, env=given)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_an_environment_of_verifiers_is_an_agent(python_with, tmp_path):
    told = told_by(python_with("verifiers==0.4.0"), "played_by_verifiers.py", tmp_path / "rows.jsonl")
    assert told["rows"][2] == {"prompt": "What is 2 + 1?", "extra_info": {"task": 2}}
    assert len(told["rows"]) == 6
    wrong, right, unnamed = told["episodes"]
    assert wrong == {
        "ended": "done",
        "message": "",
        "rewards": [0.0, 0.0],
        "info": {"right": 0.0, "words": 3.0},
        "new_rows": [""],
    }
    assert right == wrong | {"rewards": [0.0, 1.0], "info": {"right": 1.0, "words": 3.0}}
    assert unnamed["ended"] == "error"
    assert "VerifiersAgent.write_rows" in unnamed["message"]
    asked = "<|im_start|>user\nWhat is 2 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert asked in told["prompts"]
    assert f"{asked}It is 3.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n" in told["prompts"]


def test_a_server_of_mcp_gives_an_agent_its_tools(python_with):
    told = told_by(python_with("mcp==2.0.0"), "played_by_mcp.py")
    assert (told["ended"], told["message"], told["new_rows"], told["scored"]) == ("done", "", [""], False)
    assert '{"name": "look", "description": "Shows a picture."' in told["prompts"][0]
    shown = "<|im_start|>tool\n28 pixels<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    assert told["prompts"][1].startswith(told["prompts"][0])
    assert told["prompts"][1].endswith(shown)
    assert told["sizes"] == [[28, 28]]


def test_an_environment_of_openenv_is_an_agent(python_with):
    told = told_by(python_with("openenv==0.10.0"), "played_by_openenv.py")
    assert told["episodes"] == 2 * [{"ended": "done", "message": "", "rewards": [0.0, 1.0], "new_rows": [""]}]
    assert '"text": "Which number?"}<|im_end|>\n<|im_start|>assistant\n5<|im_end|>' in told["last"]
    assert '"text": "more"}' in told["last"]

import asyncio
import signal
import textwrap

import numpy as np
import pytest
import torch

from dataproto.errors import RewardError
from recipes.rewards import RewardRow, SequenceClassifier, as_reward_function, from_trl, from_verl, load_reward
from workers.roles.reward import uses_device

MESSAGES = [{"role": "user", "content": "<image>Find x."}]
ROWS = [
    RewardRow("one", "1", "geo", {"answer": "1", "level": 3}, MESSAGES),
    RewardRow("three", "2", "geo", {"answer": "2"}, MESSAGES),
]


def test_verls_function_gets_its_arguments():
    calls = []

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return len(solution_str)

    assert from_verl(compute_score)(ROWS) == [{"score": 3.0}, {"score": 5.0}]
    assert calls == [("geo", "one", "1", {"answer": "1", "level": 3}), ("geo", "three", "2", {"answer": "2"})]


def test_verls_dict_keeps_its_numbers():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": 0.5, "acc": True, "pred": "x", "length": np.int64(3), "mean": torch.tensor(0.25)}

    assert from_verl(compute_score)(ROWS[:1]) == [{"score": 0.5, "acc": 1.0, "length": 3.0, "mean": 0.25}]


def test_a_function_cannot_change_the_data():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return len(extra_info.pop("answer"))

    from_verl(compute_score)(ROWS)
    assert ROWS[0].extra_info["answer"] == "1"


def test_async_functions_run_together():
    state = {"running": 0, "most": 0}

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        state["running"] += 1
        state["most"] = max(state["most"], state["running"])
        await asyncio.sleep(0)
        state["running"] -= 1
        return float(ground_truth)

    assert from_verl(compute_score)(ROWS) == [{"score": 1.0}, {"score": 2.0}]
    assert state["most"] == 2

    async def inside_a_loop():
        return from_verl(compute_score)(ROWS)

    assert asyncio.run(inside_a_loop()) == [{"score": 1.0}, {"score": 2.0}]


def test_a_function_may_answer_at_once_or_later():
    """As one does that remembers answers of a judge."""

    async def judged():
        return 2.0

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if ground_truth == "1" else judged()

    assert from_verl(compute_score)(ROWS) == [{"score": 1.0}, {"score": 2.0}]


def test_async_functions_run_where_signals_work():
    """A time limit by `signal.alarm`, as math_verify has one, works in the main thread only."""

    def on_alarm(number, frame):
        raise TimeoutError

    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(0)
        before = signal.signal(signal.SIGALRM, on_alarm)
        signal.alarm(60)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        return 1.0

    async def inside_a_loop():  # as a cell of a notebook
        found = from_verl(compute_score)(ROWS)
        await asyncio.sleep(0)
        return found

    assert from_verl(compute_score)(ROWS) == [{"score": 1.0}, {"score": 1.0}]
    assert asyncio.run(inside_a_loop()) == [{"score": 1.0}, {"score": 1.0}]


def test_an_async_failure_names_its_row():
    async def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1 / (int(ground_truth) - 2)

    with pytest.raises(
        RewardError, match=r"row 1 \(response 'three'\): compute_score raised Zero.* \(.*\.py:\d+, in compute"
    ) as caught:
        from_verl(compute_score)(ROWS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_trls_function_gets_messages_and_columns():
    calls = {}

    def reward_func(prompts, completions, **columns):
        calls.update(columns, prompts=prompts, completions=completions)
        return [float(len(completion[0]["content"])) for completion in completions]

    assert from_trl(reward_func)(ROWS) == [{"score": 3.0}, {"score": 5.0}]
    assert calls == {
        "prompts": [MESSAGES, MESSAGES],
        "completions": [[{"role": "assistant", "content": "one"}], [{"role": "assistant", "content": "three"}]],
        "data_source": ["geo", "geo"],
        "ground_truth": ["1", "2"],
        "extra_info": [{"answer": "1", "level": 3}, {"answer": "2"}],
        "answer": ["1", "2"],
        "level": [3, None],
    }


def test_a_message_that_is_taken_for_text_is_explained():
    def plain(completions, **columns):
        return [float(len(completion.strip())) for completion in completions]

    with pytest.raises(RewardError, match=r"'list' object .* its text completion\[0\]\['content'\]"):
        from_trl(plain)(ROWS)


BOXES = [RewardRow("a", [0, 0, 4, 4], "boxes", {"index": 0}, columns={"solution": [0, 0, 4, 4], "image": "a picture"})]


def test_trls_function_gets_columns_by_their_own_names():
    def iou(completions, solution, image=None, width=8, **kwargs):
        assert (completions, solution, image, width) == (["a"], [[0, 0, 4, 4]], ["a picture"], 8)
        assert kwargs["ground_truth"] == solution
        return [0.25]

    assert from_trl(iou)(BOXES) == [{"score": 0.25}]


def test_an_argument_that_the_data_do_not_have_is_named_with_the_columns():
    def iou(completions, solution, width, trainer_state, **kwargs):
        return [0.0]

    reward = from_trl(iou)
    with pytest.raises(
        RewardError,
        match=r"iou needs width, trainer_state, .* columns are image, solution, .* gets completions, data_source, ",
    ):
        reward.check_columns(BOXES[0])
    from_trl(lambda completions, solution, **kwargs: [0.0]).check_columns(BOXES[0])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            lambda solution_str, ground_truth, tolerance: 0.0,
            "needs tolerance, but is called with data_source, solution_str",
        ),
        (lambda reward_inputs, weight: [], "needs weight, but is called with reward_inputs"),
        (lambda rows, weight: [], "needs weight, but is called with rows"),
    ],
)
def test_an_argument_that_nobody_gives_is_named_when_the_function_is_loaded(function, says):
    with pytest.raises(RewardError, match=says):
        as_reward_function(function)


def test_verls_function_may_name_fewer_arguments():
    assert as_reward_function(lambda solution_str, ground_truth: solution_str == ground_truth)(ROWS)[0] == {
        "score": 0.0
    }


def test_trls_completions_are_strings_if_prompts_are():
    def reward_func(completions, answer):
        return [completion == said for completion, said in zip(completions, answer, strict=True)]

    rows = [RewardRow("1", extra_info={"answer": "1"}, ground_truth=None, prompt="what?")]
    assert from_trl(reward_func)(rows) == [{"score": 1.0}]
    assert from_trl(reward_func)([]) == []


def test_trls_async_function():
    async def reward_func(prompts, completions, **columns):
        return [0.5] * len(completions)

    assert from_trl(reward_func)(ROWS) == [{"score": 0.5}, {"score": 0.5}]


@pytest.mark.parametrize(
    "score",
    [
        None,
        float("nan"),
        float("inf"),
        -1e39,
        "1.0",
        [1.0],
        {"acc": 1.0},
        {"score": None},
        {"score": 0.0, "acc": np.float64("nan")},
        object(),
    ],
)
def test_invalid_scores_raise_an_error_that_names_the_row(score):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if ground_truth == "1" else score

    with pytest.raises(RewardError, match=r"row 1 .*: compute_score returned .* finite number"):
        from_verl(compute_score)(ROWS)

    def reward_func(prompts, completions, **columns):
        return [1.0, score]

    with pytest.raises(RewardError, match=r"row 1 .*: reward_func returned"):
        from_trl(reward_func)(ROWS)


def test_an_exception_names_its_row_and_keeps_its_traceback():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"1": 1.0}[ground_truth]

    with pytest.raises(
        RewardError, match=r"row 1 \(response 'three'\): compute_score raised KeyError: '2' \("
    ) as caught:
        from_verl(compute_score)(ROWS)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0], "1 scores for 2 rows"),
        (1.0, "not a list of scores"),
        (None, "not a list of scores"),
        ({0: 0.5, 1: 1.0}, "not a list with the score of each row"),  # its keys were the scores
        ({0.5, 1.0}, "not a list with the score of each row"),
    ],
)
def test_a_list_of_the_wrong_length_raises_an_error(returned, says):
    def reward_func(prompts, completions, **columns):
        return returned

    with pytest.raises(RewardError, match=says):
        from_trl(reward_func)(ROWS)


def test_argument_names_determine_the_kind_of_function():
    def verl(solution_str, ground_truth, **other):
        return 1

    def trl(completions, **columns):
        return [2] * len(completions)

    def own(rows):
        return [{"score": 3, "length": len(row.solution_str)} for row in rows]

    assert as_reward_function(verl)(ROWS)[0] == {"score": 1.0}
    assert as_reward_function(trl)(ROWS)[0] == {"score": 2.0}
    assert as_reward_function(own)(ROWS)[1] == {"score": 3.0, "length": 5.0}

    def neither(x, y):
        return 0

    with pytest.raises(RewardError, match=r"neither\(x, y\) is not a reward function: expected compute_score\("):
        as_reward_function(neither)


def test_a_file_and_function_on_the_command_line(tmp_path):
    file = tmp_path / "my rewards.py"
    file.write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass

            @dataclass
            class Weights:
                length: float = 2.0

            def length(data_source, solution_str, ground_truth, extra_info=None):
                return Weights().length * len(solution_str)

            wrong = 3
            """
        )
    )
    assert load_reward(f"{file}:length")(ROWS) == [{"score": 6.0}, {"score": 10.0}]
    with pytest.raises(RewardError, match="has no function 'wrong'; it defines length"):
        load_reward(f"{file}:wrong")
    with pytest.raises(RewardError, match="has no function 'gone'"):
        load_reward(f"{file}:gone")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nothing", "FILE.py:FUNCTION"),
        ("a.py:", "FILE.py:FUNCTION"),
        (":f", "FILE.py:FUNCTION"),
        ("/nowhere/a.py:f", "there is no file"),
    ],
)
def test_an_invalid_name_raises_an_error(name, says):
    with pytest.raises(RewardError, match=says):
        load_reward(name)


def test_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    with pytest.raises(RewardError, match=r"cannot be imported: ModuleNotFoundError: .*no_such_module"):
        load_reward(f"{tmp_path / 'broken.py'}:f")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(RewardError, match="not a Python file"):
        load_reward(f"{tmp_path / 'text.txt'}:f")


def test_a_function_or_a_file_that_ends_the_program_is_named(tmp_path):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        raise SystemExit(3)

    with pytest.raises(RewardError, match=r"row 0 .*compute_score.*SystemExit: 3"):
        from_verl(compute_score)(ROWS)
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(RewardError, match=r"script.py cannot be imported: SystemExit: 0"):
        load_reward(f"{tmp_path / 'script.py'}:f")


def test_a_result_without_a_score_says_so():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"acc": 1.0}

    with pytest.raises(RewardError, match=r"row 0 .*the key 'score' is missing, which must be a finite number"):
        from_verl(compute_score)(ROWS)


def test_an_integer_beyond_all_floats_is_no_finite_score():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 10**400

    with pytest.raises(RewardError, match=r"row 0 .*a score must be a finite number"):
        from_verl(compute_score)(ROWS)


def verl_form(data_source, solution_str, ground_truth, extra_info):
    return 0.0


def trl_form(prompts, completions, **columns):
    return [0.0] * len(completions)


def form_of_rows(rows):
    return [{"score": 0.0} for _ in rows]


@pytest.mark.parametrize("function", [verl_form, trl_form, form_of_rows])
def test_a_function_that_computes_on_a_device_says_so_in_every_form(function, monkeypatch):
    assert not uses_device(as_reward_function(function))
    monkeypatch.setattr(function, "uses_device", True, raising=False)
    assert uses_device(as_reward_function(function))


def test_a_classifier_uses_a_device_unless_it_is_kept_off():
    assert uses_device(SequenceClassifier("MODEL"))
    assert not uses_device(SequenceClassifier("MODEL", device="cpu"))

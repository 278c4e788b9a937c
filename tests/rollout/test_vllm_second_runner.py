"""The policy's sampler in the form that vLLM's second model runner calls. The runner itself needs Triton: on a CPU it runs in
Triton's interpreter (`helpers.interpreted_triton`).
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.engine import SamplingParams
from rollout.sampling import sample, uniforms
from rollout.vllm import process_settings
from rollout.vllm.process_settings import runner_chosen, takes_second_runner

pytestmark = pytest.mark.vllm

VOCABULARY = 8


@pytest.fixture
def runner() -> SimpleNamespace:
    config = SimpleNamespace(model_type="llama")
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config),
        speculative_config=None,
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)),
        device=torch.device("cpu"),
        max_num_reqs=4,
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([5, 3, 4, 2]))),
    )


def batch_of(places: list[int], computed: list[int], scheduled: list[int], prefill: list[int]) -> Any:
    names = "idx_mapping_np", "num_computed_tokens_np", "num_scheduled_tokens", "prefill_len_np"
    values = places, computed, scheduled, prefill
    return SimpleNamespace(**{name: np.array(value) for name, value in zip(names, values, strict=True)})


def begin(sampler: Any, place: int, seed: int, sampling: SamplingParams, drawn: int = 0) -> int:
    slot: int = sampler.open(seed, drawn, sampling, stop_id=7)
    sampler.add_request(place, 99, SimpleNamespace(extra_args={"dataproto_request": slot}))
    return slot


def expected(logits: Tensor, sampling: SamplingParams, seed: int, number: int) -> tuple[int, float]:
    """A token and its log-prob, of one row alone."""
    numbers = torch.from_numpy(uniforms(np.array([seed], dtype=np.uint64), np.array([number])))
    token, value = sample(logits[None], sampling, numbers, banned_ids=())
    return int(token), float(value)


def test_rows_are_found_by_their_places_in_the_runner(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    sampler = SecondRunnerSampler(runner)
    warm, hot = SamplingParams(max_tokens=9, temperature=0.7), SamplingParams(max_tokens=9, temperature=1.3)
    first, second = begin(sampler, 2, seed=11, sampling=warm), begin(sampler, 0, seed=12, sampling=hot, drawn=3)
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(0))

    # Place 0 has read 5 tokens of its prompt of 5; place 2 has its prompt of 4 and two tokens more.
    found = sampler(logits, batch_of([0, 2], computed=[0, 5], scheduled=[5, 1], prefill=[5, 4]))

    wanted = [expected(logits[0], hot, 12, 3), expected(logits[1], warm, 11, 2)]
    assert found.sampled_token_ids.tolist() == [[token] for token, _ in wanted]
    assert found.num_sampled.tolist() == [1, 1]
    assert found.num_rejected.tolist() == [0, 0]
    assert sampler.log_probs(second, 1) == pytest.approx([wanted[0][1]], abs=1e-6)
    assert sampler.log_probs(first, 3)[2] == pytest.approx(wanted[1][1], abs=1e-6)


class Products:
    """vLLM's object that computes logits, for the tensors of `Projection`."""

    def __call__(self, projection: Any, states: Tensor) -> Tensor:
        return states @ projection.weight.t()


def test_tokens_that_were_drawn_most_can_be_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary of 8 the head drafts 3: at first those with the lowest ids, then the most frequent, never a banned one. It
    uses the model's weights of the last time that it was told of them.
    """
    from rollout.vllm import head_sampler
    from rollout.vllm.sampler import Float32Head

    monkeypatch.setattr(head_sampler, "MOST_DRAWN", 3)
    weight = torch.eye(VOCABULARY)
    own = SimpleNamespace(weight=weight, tp_size=1, quant_method=Float32Head(), org_vocab_size=VOCABULARY)
    speculator = SimpleNamespace(
        model=SimpleNamespace(lm_head=own, logits_processor=Products()),
        max_num_reqs=2,
        num_speculative_steps=1,
        device=torch.device("cpu"),
        current_draft_step=torch.zeros(1, dtype=torch.int64),
    )
    head = head_sampler.HeadDrafts(speculator, banned_ids=[1])
    head.temper(torch.zeros(2))  # each row drafts its likeliest token
    states = torch.tensor([[0.0, 9, 1, 2, 7, 3, 4, 5], [3.0, 9, 1, 2, 0, 7, 4, 0]])
    assert speculator.sample_draft(states).tolist() == [3, 0]

    head.count(torch.tensor([[4, 5], [4, -1], [1, 1], [7, -1], [7, 7]]))
    assert speculator.sample_draft(states).tolist() == [3, 0]
    head.choose_tokens()
    assert speculator.sample_draft(states).tolist() == [4, 5]

    weight *= -1
    head.choose_tokens()
    assert speculator.sample_draft(states).tolist() == [5, 4]
    assert head.num_bytes == 3 * VOCABULARY * 4


@pytest.mark.parametrize("changed", [{"tp_size": 2}, {"quant_method": None}, {"org_vocab_size": 4}])
def test_a_head_drafts_all_tokens_where_a_part_saves_nothing(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A projection that ranks share or that is quantised has no rows to copy, and a small one is read as it is."""
    from rollout.vllm import head_sampler
    from rollout.vllm.sampler import Float32Head

    monkeypatch.setattr(head_sampler, "MOST_DRAWN", 4)
    settings = {"tp_size": 1, "quant_method": Float32Head(), "org_vocab_size": VOCABULARY} | changed
    size = int(settings["org_vocab_size"])
    speculator = SimpleNamespace(
        model=SimpleNamespace(lm_head=SimpleNamespace(weight=torch.eye(size), **settings), logits_processor=Products()),
        max_num_reqs=1,
        num_speculative_steps=1,
        device=torch.device("cpu"),
        current_draft_step=torch.zeros(1, dtype=torch.int64),
    )
    head = head_sampler.HeadDrafts(speculator, banned_ids=[size - 1])
    head.temper(torch.zeros(1))
    assert speculator.sample_draft(torch.arange(float(size))[None]).tolist() == [size - 2]
    assert head.num_bytes == 0


class Stored(TorchDispatchMode):
    """Notes the numbers of dimensions of what is stored at indices."""

    def __init__(self) -> None:
        super().__init__()
        self.dimensions: list[int] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation is torch.ops.aten.index_put_.default:
            self.dimensions.append(args[2].ndim)
        return operation(*args, **(kwargs or {}))


def test_a_step_without_drafts_waits_for_no_device_where_the_engine_drafts(runner: SimpleNamespace) -> None:
    """To store a number of the host at indices, torch copies it, and the host waits until the device has done all of its work."""
    from rollout.vllm.second_runner import SecondRunnerSampler

    runner.speculative_config = SimpleNamespace()
    sampler = SecondRunnerSampler(runner)
    slots = [begin(sampler, place, seed=1, sampling=SamplingParams(max_tokens=4)) for place in (0, 3)]
    with Stored() as stored:
        sampler(torch.zeros(2, VOCABULARY), batch_of([0, 3], computed=[0, 0], scheduled=[5, 2], prefill=[5, 2]))
    assert [sampler.drafted_and_accepted(slot, 1) for slot in slots] == [(0, 0), (0, 0)]
    assert stored.dimensions
    assert min(stored.dimensions) == 1


def test_a_prompt_that_is_read_in_parts_samples_nothing(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    sampler = SecondRunnerSampler(runner)
    slot = begin(sampler, 1, seed=5, sampling=SamplingParams(max_tokens=4))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))

    part = sampler(logits, batch_of([1], computed=[0], scheduled=[2], prefill=[3]))
    whole = sampler(logits, batch_of([1], computed=[2], scheduled=[1], prefill=[3]))

    assert part.num_sampled.tolist() == [0]
    assert whole.num_sampled.tolist() == [1]
    token, value = expected(logits[0], SamplingParams(max_tokens=4), 5, 0)
    assert whole.sampled_token_ids.tolist() == [[token]]
    assert sampler.log_probs(slot, 1) == pytest.approx([value], abs=1e-6)


def test_a_slot_that_is_given_again_has_the_settings_of_its_new_request(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    sampler = SecondRunnerSampler(runner)
    kept = begin(sampler, 0, seed=1, sampling=SamplingParams(max_tokens=4))
    slot = begin(sampler, 3, seed=2, sampling=SamplingParams(max_tokens=4))
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(2))
    batch = batch_of([0, 3], computed=[5, 2], scheduled=[1, 1], prefill=[5, 2])
    sampler(logits, batch)
    sampler.close(slot)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    assert begin(sampler, 3, seed=9, sampling=greedy) == slot
    assert kept != slot

    assert int(sampler(logits, batch).sampled_token_ids[1]) == int(logits[1].argmax())


def test_requests_of_a_start_get_tokens_without_a_slot(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    sampler = SecondRunnerSampler(runner)
    sampler.add_request(0, SimpleNamespace(extra_args=None))

    found = sampler(torch.zeros(2, VOCABULARY), batch_of([0, 1], computed=[0, 0], scheduled=[3, 3], prefill=[3, 3]))

    assert found.sampled_token_ids.shape == (2, 1)
    assert found.num_sampled.tolist() == [1, 1]


def test_a_request_that_goes_on_after_it_was_put_off_draws_its_next_number(runner: SimpleNamespace) -> None:
    """vLLM reads the prompt of 3 and the two tokens sampled before anew: in one step, or in two."""
    from rollout.vllm.second_runner import SecondRunnerSampler

    sampler = SecondRunnerSampler(runner)
    slot = begin(sampler, 1, seed=4, sampling=SamplingParams(max_tokens=9))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))

    part = sampler(logits, batch_of([1], computed=[0], scheduled=[4], prefill=[5]))
    whole = sampler(logits, batch_of([1], computed=[0], scheduled=[5], prefill=[5]))

    assert part.num_sampled.tolist() == [0]
    token, value = expected(logits[0], SamplingParams(max_tokens=9), 4, 2)
    assert whole.sampled_token_ids.tolist() == [[token]]
    assert sampler.log_probs(slot, 3)[2] == pytest.approx(value, abs=1e-6)


def test_of_drafted_tokens_those_count_that_are_drawn(runner: SimpleNamespace) -> None:
    """Three rows: the first keeps one of its two drafts, the second has none, the third keeps its only one."""
    from rollout.vllm.second_runner import SecondRunnerSampler

    runner.speculative_config, sampling = object(), SamplingParams(max_tokens=9)
    sampler = SecondRunnerSampler(runner)
    slots = [begin(sampler, place, seed=20 + place, sampling=sampling) for place in (0, 1, 3)]
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(5))
    # Tokens are read from these numbers on: rows have 5, 2 and 1 tokens of their prompts and 1, 0 and 0 of their responses.
    drawn = [[expected(logits[place], sampling, 20, 1 + place)[0] for place in range(3)]]
    drawn += [[expected(logits[3], sampling, 21, 0)[0]]]
    drawn += [[expected(logits[4 + place], sampling, 23, place)[0] for place in range(2)]]
    batch = batch_of([0, 1, 3], computed=[5, 2, 1], scheduled=[3, 1, 2], prefill=[5, 3, 2])
    batch.num_draft_tokens, batch.num_draft_tokens_per_req = 3, np.array([2, 0, 1])
    read = [9, drawn[0][0], (drawn[0][1] + 1) % VOCABULARY, 9, 9, drawn[2][0]]
    batch.input_ids, batch.logits_indices = torch.tensor([0, *read]), torch.arange(1, 7)

    found = sampler(logits, batch, None, None)  # as vLLM calls its rejection sampler

    assert found.sampled_token_ids.tolist() == [[*drawn[0][:2], -1], [*drawn[1], -1, -1], [*drawn[2], -1]]
    assert found.num_sampled.tolist() == [2, 1, 2]
    assert found.num_rejected.tolist() == [1, 0, 0]
    assert sampler.drafted_and_accepted(slots[2], 2) == (1, 1)
    values = [expected(logits[4 + place], sampling, 23, place)[1] for place in range(2)]
    assert sampler.log_probs(slots[2], 2) == pytest.approx(values, abs=1e-6)


def test_hundreds_of_drafts_are_counted(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    runner.speculative_config = object()
    sampler = SecondRunnerSampler(runner)
    slot = begin(sampler, 0, seed=1, sampling=SamplingParams(max_tokens=9, temperature=0.0))
    batch = batch_of([0], computed=[4], scheduled=[301], prefill=[5])
    batch.num_draft_tokens, batch.num_draft_tokens_per_req = 300, np.array([300])
    batch.input_ids, batch.logits_indices = torch.zeros(301, dtype=torch.int64), torch.arange(301)

    found = sampler(torch.eye(VOCABULARY)[torch.full((301,), 3)], batch)  # draws 3, and all drafts are 0

    assert found.num_sampled.tolist() == [1]
    assert sampler.drafted_and_accepted(slot, 1) == (300, 0)


def test_with_a_head_the_device_knows_how_many_drafts_counted(runner: SimpleNamespace) -> None:
    """The host has prepared each step as if all drafts of the step before had counted, and learns of none of them."""
    from rollout.vllm.head_sampler import HeadSampler

    asked: list[Any] = []
    runner.speculative_config, runner.num_speculative_steps, sampling = object(), 2, SamplingParams(max_tokens=9)
    head = SimpleNamespace(tp_size=1, quant_method=None, org_vocab_size=VOCABULARY)
    runner.speculator = SimpleNamespace(
        model=SimpleNamespace(lm_head=head),
        max_num_reqs=4,
        num_speculative_steps=2,
        device=torch.device("cpu"),
        propose=lambda *_, **__: asked,
    )
    sampler = HeadSampler(runner)
    sampler.take_drafts()
    slots = [begin(sampler, place, seed=20 + place, sampling=sampling, drawn=place) for place in (0, 3)]
    rows = [(0, 20, 0), (3, 23, 3)]  # place in the runner, seed, number of the first token in the stream

    def step(lengths: list[int], computed: list[int], drafted: int, wrong: tuple[int, ...]) -> Any:
        """Rows have read ``lengths`` tokens; the host believes in ``computed``. Drafts after a ``wrong`` place do not count."""
        each = 1 + drafted
        logits = torch.randn(2 * each, VOCABULARY, generator=torch.Generator().manual_seed(sum(lengths)))
        first = [
            length + 1 - int(runner.req_states.prompt_len.np[place]) for length, (place, _, _) in zip(lengths, rows)
        ]
        drawn = [
            [expected(logits[each * row + at], sampling, seed, drawn + first[row] + at) for at in range(each)]
            for row, (_, seed, drawn) in enumerate(rows)
        ]
        batch = batch_of([0, 3], computed=computed, scheduled=[each, each], prefill=[5, 2])
        batch.seq_lens = torch.tensor(lengths, dtype=torch.int32) + each
        batch.num_reqs, batch.num_draft_tokens, batch.has_prefill = 2, 2 * drafted, False
        if drafted:
            batch.num_draft_tokens_per_req = np.array([drafted, drafted], dtype=np.int32)
            read = [
                [9, *((token + (at in wrong)) % VOCABULARY for at, (token, _) in enumerate(row[:-1]))] for row in drawn
            ]
            batch.input_ids, batch.logits_indices = torch.tensor(read).flatten(), torch.arange(2 * each)
        found = sampler(logits, batch)
        count = 1 + min([*wrong, drafted])
        assert found.sampled_token_ids[:, :count].tolist() == [[token for token, _ in row[:count]] for row in drawn]
        assert found.num_sampled.tolist() == [count, count]
        assert found.num_rejected.tolist() == [each - count] * 2
        for slot, (row, values) in zip(slots, enumerate(drawn), strict=True):
            told = sampler.log_probs(slot, first[row] + count)[first[row] :]
            assert told == pytest.approx([value for _, value in values[:count]], abs=1e-6)
        drafts = sampler.propose(batch, num_speculative_tokens=2)
        assert drafts is asked
        coming = [
            uniforms(np.full(2, seed, dtype=np.uint64), drawn + first[row] + count + np.arange(2))
            for row, (_, seed, drawn) in enumerate(rows)
        ]
        assert np.array_equal(sampler._head._numbers[:2].numpy(), coming)
        return batch

    step([4, 1], computed=[4, 1], drafted=0, wrong=())
    step([5, 2], computed=[5, 2], drafted=2, wrong=(1,))
    step([7, 4], computed=[8, 5], drafted=2, wrong=())
    batch = step([10, 7], computed=[11, 8], drafted=0, wrong=())
    assert [sampler.drafted_and_accepted(slot, 7) for slot in slots] == [(4, 3), (4, 3)]
    assert sampler.propose(batch, num_speculative_tokens=0).tolist() == [[0, 0], [0, 0]]
    batch.has_prefill = True
    assert sampler.propose(batch, num_speculative_tokens=0) is asked  # the head reads all prompts


def test_drafts_are_those_of_the_group_and_filled_up(runner: SimpleNamespace) -> None:
    from rollout.vllm.second_runner import SecondRunnerSampler

    runner.speculative_config, runner.num_speculative_steps = object(), 3
    runner.speculator, runner.draft_tokens_handler = SimpleNamespace(), SimpleNamespace()
    sampler = SecondRunnerSampler(runner)
    sampler.take_drafts()
    greedy, prompt = SamplingParams(max_tokens=9, temperature=0.0), torch.tensor([1, 2, 3, 4, 5, 1])
    for place in (0, 1):
        sampler.open_drafts(begin(sampler, place, seed=place, sampling=greedy), "group", prompt)
    batch = batch_of([0, 1], computed=[4, 2], scheduled=[1, 1], prefill=[5, 3])
    batch.num_reqs, batch.req_ids = 2, ["a", "b"]
    sampler(torch.eye(VOCABULARY)[[2, 6]], batch)  # row a samples 2, row b samples 6

    assert runner.speculator.propose(batch, None, None).tolist() == [[3, 4, 5], [0, 0, 0]]
    told = runner.draft_tokens_handler.get_draft_tokens()
    assert (told.req_ids, told.draft_token_ids) == (["a", "b"], [[3, 4, 5], []])
    assert runner.speculator.propose(input_batch=batch, dummy_run=True).tolist() == [[0, 0, 0]] * 2


def test_on_cuda_drafts_are_equally_long_or_none(runner: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that fill them up are not counted as drafted."""
    from rollout.vllm.second_runner import SecondRunnerSampler

    runner.speculative_config = object()
    sampler = SecondRunnerSampler(runner)
    prompt = torch.tensor([1, 2, 3, 1])
    slots = [begin(sampler, place, seed=place, sampling=SamplingParams(max_tokens=9)) for place in (0, 1, 3)]
    for slot in slots:
        sampler.open_drafts(slot, "group", prompt)
    sampler._set_slots(np.array(slots))
    sampler.side_stream = SimpleNamespace()

    assert sampler.next_drafts([[5], [6], []], most=5) == [[], [], []]
    assert sampler.next_drafts([[1, 2], [7], []], most=5) == [[3, 1, 6, 7, 0], [0] * 5, []]
    assert sampler.filled[slots].tolist() == [1, 5, 0]
    monkeypatch.setattr("rollout.drafts.Drafts.pay", lambda self, rows: rows != 2)
    assert sampler.next_drafts([[1, 2], [7], []], most=5) is None


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_run_one_vllm_do_not_look_at_their_clocks(
    runner: SimpleNamespace, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have to take the same steps."""
    from rollout.vllm.sampler import PolicySampler

    runner.speculative_config, runner.device = object(), torch.device("cuda")
    runner.vllm_config.parallel_config.world_size = ranks
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(PolicySampler, "_clear", lambda self: None)
    drafts = PolicySampler(runner).drafts
    assert drafts is not None
    assert all(drafts.pay(4) for _ in range(9)) is (ranks == 2)


@pytest.mark.parametrize(
    ("version", "asked", "taken"),
    [
        ("0.24.0", "1", False),
        ("0.1.dev7", "1", False),
        ("0.31.4", None, False),
        ("0.32.0", None, True),
        ("0.33.0+cu130", "1", True),
        ("0.33.0", "0", False),
        ("1.0", None, True),
    ],
)
def test_the_second_runner_is_taken_from_0_32_on(
    version: str, asked: str | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    if asked is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    for triton in (True, False):
        monkeypatch.setattr(process_settings, "has_triton", lambda found=triton: found)
        assert takes_second_runner(version) is (taken and triton)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whole_engines_run_on_the_second_runner() -> None:
    """Tests of engines once more, with Triton's interpreter, by which vLLM takes its second runner on a CPU."""
    folder = Path(__file__).parent
    tests = [
        "test_fused_sampling.py",
        "test_vllm_speculation.py",
        "test_vllm_recurrent.py::test_whatever_is_drafted_tokens_and_log_probs_are_equal",
        "test_vllm_recurrent.py::test_plans_and_rows_with_drafts_are_those_that_vllm_makes",
        "test_vllm_experts.py",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "vllm", *(str(folder / each) for each in tests)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_choice_of_a_runner_ends_with_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with runner_chosen(False):
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    with pytest.raises(ValueError, match="stopped"), runner_chosen(True):
        raise ValueError("stopped")
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ

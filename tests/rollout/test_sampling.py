import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataproto.errors import InvalidConfig
from rollout.engine import SamplingParams, create_engine
from rollout.sampling import derive_seed, draw_tokens, policy_log_probs, restrict, uniforms


def test_temperature_and_bans_by_hand():
    log_probs = policy_log_probs(torch.tensor([[2.0, 0.0, 7.0]]), temperature=2.0, banned_ids=(2,))
    e = torch.tensor(1.0).exp()
    torch.testing.assert_close(log_probs[0, :2].exp(), torch.stack([e, torch.tensor(1.0)]) / (e + 1))
    assert log_probs[0, 2].exp() == 0


def test_top_k_and_top_p_keep_the_right_tokens():
    log_probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    assert (restrict(log_probs, top_k=2) > 0).tolist() == [[False, True, False, True]]
    assert (restrict(log_probs, top_p=0.7) > 0).tolist() == [[False, True, False, True]]
    assert (restrict(log_probs, top_p=0.71) > 0).tolist() == [[False, True, True, True]]
    assert (restrict(log_probs, top_p=1e-9) > 0).tolist() == [[False, True, False, False]]
    assert (restrict(log_probs, top_p=1e-46) > 0).tolist() == [[False, True, False, False]]  # 0 in float32
    assert (restrict(log_probs, top_k=3, top_p=0.5) > 0).tolist() == [[False, True, False, True]]
    assert (restrict(log_probs, min_p=0.6) > 0).tolist() == [[False, True, False, True]]  # at least 0.24
    assert (restrict(log_probs, min_p=1.0) > 0).tolist() == [[False, True, False, False]]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=9).filter(any), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_distribution_function(weights, number):
    token = int(draw_tokens(torch.tensor([weights], dtype=torch.float32), torch.tensor([number], dtype=torch.float64)))
    assert weights[token] > 0
    assert sum(weights[:token]) <= number * sum(weights) + 1e-6
    assert number * sum(weights) <= sum(weights[: token + 1]) + 1e-6


def test_streams_are_uniform_and_apart():
    seeds = np.array([derive_seed(0, "p", sample) for sample in range(2000)], dtype=np.uint64)
    draws = np.stack([uniforms(seeds, step) for step in range(20)])
    assert draws.min() >= 0
    assert draws.max() < 1
    histogram = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((histogram - 2000) ** 2 / 2000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    correlation = np.corrcoef(draws)[np.triu_indices(20, 1)]
    assert np.abs(correlation).max() < 0.1


def test_a_stream_does_not_depend_on_its_neighbours():
    seeds = np.array([3, 1, 2], dtype=np.uint64)
    assert uniforms(seeds, 4)[1] == uniforms(seeds[1:2], 4)[0]


@given(seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**40))
def test_streams_on_a_device_are_those_on_the_host_and_of_a_reference(seed, step):
    """SplitMix64 in plain integers: state ``mixed(seed) + (step + 1) * golden``, then the finalizer."""

    def mixed(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    seeds = np.array([seed, seed], dtype=np.uint64)
    steps = np.array([step, step + 1])
    expected = [
        (mixed((mixed(seed) + (number + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for number in steps.tolist()
    ]
    assert uniforms(seeds, steps).tolist() == expected
    assert uniforms(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(steps)).tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        *({"n": 0}, {"max_tokens": 0}, {"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"n": 2, "temperature": 0}),
        *({"min_p": 1.1}, {"min_p": -0.1}, {"stop": "text"}, {"stop": ("",)}, {"top_log_probs": -1}),
        *({"temperature": math.inf}, {"temperature": math.nan}, {"temperature": "1"}, {"top_p": "1"}, {"n": [1]}),
    ],
)
def test_impossible_sampling_is_refused(options):
    with pytest.raises(InvalidConfig):
        SamplingParams(**options)


@pytest.mark.parametrize("top_k", [-1, None, 2.5, "5"])
def test_a_top_k_that_counts_no_tokens_is_told_what_stands_for_all(top_k):
    with pytest.raises(InvalidConfig, match=rf"top_k={top_k!r}: must be a whole number, 0 \(all tokens\) or more"):
        SamplingParams(top_k=top_k)


def test_an_unknown_engine_is_refused():
    with pytest.raises(InvalidConfig, match="'hf'"):
        create_engine("sglang", "nowhere")

"""The kernel that draws tokens on CUDA, in Triton's interpreter, beside the operations that it takes the place of."""

import pytest
import torch

from helpers.interpreted_triton import interpreted
from rollout.sampling import BANNED_LOGIT, draw_tokens, policy_log_probs

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not interpreted(), reason="test_vllm_second_runner.py runs these with Triton's interpreter"),
]


@pytest.mark.parametrize(("words", "scale"), [(151_936, 3.0), (5000, 1.0), (257, 8.0), (2048, 0.01)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_log_probs_are_those_of_the_operations(words, scale, temperature):
    from rollout.fused_sampling import draw

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(24, words, generator=generator) * scale
    logits[3], logits[3, 7] = BANNED_LOGIT, 1.0
    logits[4, words // 2 :] = -torch.inf
    logits[5, : words // 2] = BANNED_LOGIT
    numbers = torch.rand(24, dtype=torch.float64, generator=generator)
    numbers[:6] = torch.tensor([0, 1 - 2**-53, 0.5, 0.5, 1 - 2**-53, 0], dtype=torch.float64)
    expected = policy_log_probs(logits, temperature, ())
    tokens, log_probs = draw(logits, temperature, numbers)
    torch.testing.assert_close(log_probs, expected.gather(1, tokens[:, None])[:, 0], atol=3e-5, rtol=0)
    assert (expected.exp().gather(1, tokens[:, None]) > 0).all()
    assert tokens[3] == 7
    assert tokens[4] < words // 2 <= tokens[5]
    # Rounding may move a border between two tokens.
    assert (tokens == draw_tokens(expected.exp(), numbers)).sum() >= 23


def test_each_row_has_its_temperature_and_0_is_greedy():
    from rollout.fused_sampling import draw

    generator = torch.Generator().manual_seed(2)
    logits, numbers = torch.randn(4, 5000, generator=generator), torch.rand(4, dtype=torch.float64, generator=generator)
    logits[2, [17, 4000]] = 9.0  # the first of equals
    temperatures = torch.tensor([1.0, 0.0, 0.0, 0.5])
    tokens, log_probs = draw(logits, temperatures, numbers)
    assert tokens[1:3].tolist() == logits[1:3].argmax(-1).tolist()
    assert tokens[2] == 17
    for row in (0, 3):
        alone = draw(logits[row : row + 1], float(temperatures[row]), numbers[row : row + 1])
        assert (int(alone[0]), float(alone[1])) == (int(tokens[row]), float(log_probs[row]))
    expected = logits[1:3].log_softmax(-1).amax(-1)
    torch.testing.assert_close(log_probs[1:3], expected, atol=3e-5, rtol=0)


def test_a_row_does_not_depend_on_others():
    from rollout.fused_sampling import draw

    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    numbers = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
    whole = draw(logits, 0.6, numbers)
    for row in range(5):
        alone = draw(logits[row : row + 1], 0.6, numbers[row : row + 1])
        assert all(torch.equal(one[row : row + 1], other) for one, other in zip(whole, alone, strict=True))


def test_equally_spread_numbers_draw_the_distribution():
    from rollout.fused_sampling import draw

    logits = torch.tensor([[0.0, 1.0, BANNED_LOGIT, 2.0, 0.5]]).expand(1000, 5).contiguous()
    tokens, _ = draw(logits, 1.0, (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    torch.testing.assert_close(torch.bincount(tokens, minlength=5) / 1000, logits[0].softmax(-1), atol=1e-3, rtol=0)


def test_banned_ids_are_not_drawn_and_take_no_probability():
    from rollout.fused_sampling import draw

    numbers = (torch.arange(600, dtype=torch.float64) + 0.5) / 600
    tokens, log_probs = draw(torch.zeros(600, 5), 1.0, numbers, banned_ids=(0, 3))
    assert torch.bincount(tokens, minlength=5).tolist() == [0, 200, 200, 0, 200]
    torch.testing.assert_close(log_probs, torch.full((600,), 1 / 3).log(), atol=1e-6, rtol=0)


def test_logits_that_are_not_finite_are_told_by_the_log_prob():
    from rollout.fused_sampling import draw

    logits = torch.randn(3, 3000)
    logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
    tokens, log_probs = draw(logits, 1.0, torch.full((3,), 0.5, dtype=torch.float64))
    assert not log_probs.isfinite().any()
    assert (tokens < 3000).all()

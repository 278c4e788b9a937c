"""Log-probs in chunks compared with full logits, and the memory they need."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from rollout.sampling import policy_log_probs
from workers.model.logprobs import token_log_probs


def reference(hidden, weight, targets, temperature, banned):
    logits = linear(hidden, weight).double() / temperature
    logits[:, banned] = float("-inf")
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


def drawn(tokens=37, vocabulary=50, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 16, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(0, vocabulary - 10, (tokens,), generator=generator)


@pytest.mark.parametrize(
    ("elements", "compiled"),
    [(50, False), (500, False), (10**6, False), pytest.param(500, True, marks=pytest.mark.long)],
)  # 1, 10 and all tokens at a time
def test_chunks_give_the_same_values_and_gradients_as_full_logits(elements, compiled):
    hidden, weight, targets = drawn()
    arguments = {"temperature": 0.7, "banned_ids": (41, 45), "entropy": True, "compiled": compiled}
    expected, expected_entropy = reference(hidden, weight, targets, 0.7, [41, 45])
    log_probs, entropy = token_log_probs(hidden, weight, targets, chunk_elements=elements, **arguments)
    torch.testing.assert_close(log_probs, expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected_entropy.float(), atol=1e-5, rtol=0)
    ours = torch.autograd.grad((log_probs - 0.3 * entropy).sum(), (hidden, weight))
    finite = torch.nan_to_num(expected - 0.3 * expected_entropy)
    theirs = torch.autograd.grad(finite.sum(), (hidden, weight), retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


@given(st.integers(1, 6), st.integers(1, 40), st.sampled_from([1.0, 0.6]), st.booleans(), st.integers(0, 5))
@settings(max_examples=8)
@pytest.mark.slow
def test_gradients_in_double_precision(tokens, chunk, temperature, entropy, seed):
    hidden, weight, targets = drawn(tokens, 13, torch.float64, seed)

    def outputs(hidden, weight):
        found = token_log_probs(hidden, weight, targets, temperature, (5,), entropy, chunk_elements=chunk)
        return tuple(part for part in found if part is not None)

    targets[targets == 5] = 4  # a banned token has no log-prob to differentiate
    assert outputs(hidden, weight)[0].dtype == torch.float64
    assert torch.autograd.gradcheck(outputs, (hidden, weight))


def test_equals_the_policy_of_the_engines():
    hidden, weight, targets = drawn()
    log_probs, _ = token_log_probs(hidden, weight, targets, 0.7, (41, 45), chunk_elements=200)
    whole = policy_log_probs(linear(hidden, weight), 0.7, (41, 45))
    torch.testing.assert_close(log_probs, whole.gather(1, targets[:, None]).squeeze(1), atol=5e-6, rtol=0)


def test_frozen_inputs_get_no_gradient():
    hidden, weight, targets = drawn()
    (to_weight,) = torch.autograd.grad(token_log_probs(hidden, weight, targets)[0].sum(), weight)
    frozen = token_log_probs(hidden, weight.detach(), targets, chunk_elements=100)[0]
    (to_hidden,) = torch.autograd.grad(frozen.sum(), hidden)
    expected = reference(hidden, weight, targets, 1.0, [])[0]
    both = torch.autograd.grad(expected.sum(), (hidden, weight))
    torch.testing.assert_close((to_hidden, to_weight), both, atol=1e-4, rtol=0)


def test_the_backward_pass_can_be_run_again():
    hidden, weight, targets = drawn()
    total = token_log_probs(hidden, weight, targets)[0].sum()
    first = torch.autograd.grad(total, (hidden, weight), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(total, (hidden, weight)), strict=True))


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_under_autocast_statistics_stay_in_float32(master):
    hidden, weight, targets = drawn(tokens=200)
    held = weight.detach().to(master).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, entropy = token_log_probs(hidden, held, targets, entropy=True, chunk_elements=1000)
    assert log_probs.dtype == entropy.dtype == torch.float32
    states = hidden.detach().bfloat16().float().requires_grad_()
    rounded = weight.detach().bfloat16().float().requires_grad_()
    expected, _ = reference(states, rounded, targets, 1.0, [])
    torch.testing.assert_close(
        log_probs, expected.float(), atol=0.1, rtol=0
    )  # bfloat16 logits of size 10 are 0.03 apart
    grad = torch.autograd.grad(log_probs.sum(), held)[0]
    assert grad.dtype == master
    theirs = torch.autograd.grad(expected.sum(), rounded)[0]
    assert (grad - theirs).norm() < 0.02 * theirs.norm()


def test_no_tensor_of_all_logits_is_kept_for_the_backward_pass():
    hidden, weight, targets = drawn(tokens=64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        token_log_probs(hidden, weight, targets, entropy=True, chunk_elements=500)
    assert 0 < sum(kept) <= hidden.numel() + weight.numel() + 3 * len(targets)


def test_banned_tokens_have_probability_zero_and_do_not_change_the_entropy():
    log_probs, entropy = token_log_probs(
        torch.ones(1, 2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [50.0, 50.0]]), torch.tensor([0]), 1.0, (2,), True
    )
    torch.testing.assert_close(log_probs, torch.tensor([0.5]).log())
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())


def test_no_tokens_is_not_an_error():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.zeros(9, 4, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, weight, torch.zeros(0, dtype=torch.int64), entropy=True)
    assert log_probs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(log_probs.sum() + entropy.sum(), (hidden, weight))
    assert [grad.shape for grad in grads] == [(0, 4), (9, 4)]
    assert not grads[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_not_rounded(dtype):
    """Rounded to bfloat16 they would be 0.02 nats off on average."""
    hidden, weight, targets = drawn(tokens=200, dtype=dtype)
    hidden, weight = hidden.detach() * 2, weight.detach() * 2
    found, _ = token_log_probs(hidden, weight, targets, chunk_elements=500)
    exact, _ = reference(hidden.double(), weight.double(), targets, 1.0, [])
    assert (found - exact).abs().max() < 1e-5
    rounded = linear(hidden, weight).double().log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    assert (rounded - exact).abs().mean() > 1e-3

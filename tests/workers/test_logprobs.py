import torch
from torch.nn.functional import linear

from workers.logprobs import token_log_probs


def reference(hidden, weight, targets, temperature, banned):
    logits = linear(hidden, weight).double() / temperature
    logits[:, banned] = float("-inf")
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(targets), distribution.entropy()


def test_chunks_give_the_same_values_and_gradients_as_full_logits():
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 40, (37,))
    arguments = {"temperature": 0.7, "banned_ids": (41, 45), "entropy": True}
    expected, expected_entropy = reference(hidden, weight, targets, 0.7, [41, 45])
    for elements in (50, 500, 10**6):  # 1, 10 and all tokens at a time
        log_probs, entropy = token_log_probs(hidden, weight, targets, chunk_elements=elements, **arguments)
        torch.testing.assert_close(log_probs, expected.float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected_entropy.float(), atol=1e-5, rtol=0)
        ours = torch.autograd.grad((log_probs - 0.3 * entropy).sum(), (hidden, weight))
        finite = torch.nan_to_num(expected - 0.3 * expected_entropy)
        theirs = torch.autograd.grad(finite.sum(), (hidden, weight), retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_banned_tokens_have_probability_zero_and_do_not_spoil_the_entropy():
    log_probs, entropy = token_log_probs(
        torch.ones(1, 2), torch.tensor([[0.0, 0.0], [0.0, 0.0], [50.0, 50.0]]), torch.tensor([0]), 1.0, (2,), True
    )
    torch.testing.assert_close(log_probs, torch.tensor([0.5]).log())
    torch.testing.assert_close(entropy, torch.tensor([2.0]).log())


def test_no_tokens_is_not_an_error():
    log_probs, entropy = token_log_probs(
        torch.zeros(0, 4), torch.zeros(9, 4), torch.zeros(0, dtype=torch.int64), entropy=True
    )
    assert log_probs.shape == entropy.shape == (0,)

"""How prompts of a run are rendered ahead of vLLM, without vLLM."""

from dataclasses import dataclass, field, replace
from threading import Event

import torch

from rollout.adapters import Adapter, AdapterConfig, AdapterRequest
from rollout.continuation import SubmittedRequest
from rollout.engine import Request, SamplingParams
from rollout.vllm.prompt_rendering import SHARED_TOKENS, RenderedAhead, prompt_tokens_of


def test_requests_with_other_media_or_adapters_are_other_prompts():
    ids, pictures, pixels = torch.tensor([1]), [object(), object()], [torch.ones(1), torch.ones(1)]
    for name, same, other in (
        ("multi_modal_data", {"image": pictures[:1]}, {"image": pictures[1:]}),
        ("multi_modal_inputs", {"pixel_values": pixels[0]}, {"pixel_values": pixels[1]}),
    ):
        one = Request((), ids, ids, ids, **{name: same})
        assert replace(one, **{name: dict(same)}, seed=2).prompt_key == one.prompt_key
        assert replace(one, **{name: other}).prompt_key != one.prompt_key
    adapted = AdapterRequest((), ids, ids, ids)
    assert replace(adapted, adapter=Adapter(AdapterConfig(2), {})).prompt_key != adapted.prompt_key


@dataclass
class Renderer:
    """Renders a prompt as its ids; waits at the prompt 6 until it may go on."""

    may_go_on: Event = field(default_factory=Event)
    last: list[object] = field(default_factory=list)

    def render_one(self, request, sampling):
        if int(request.input_ids[0]) == 6:
            assert self.may_go_on.wait(60)
        return request.input_ids


def test_a_run_begins_before_most_prompts_are_rendered():
    """Prompts of 100 tokens with three samples each, 800 tokens a step: the first step waits for one prompt, not for 16."""
    prompts, renderer = [torch.full((100,), number) for number in range(40)], Renderer()
    requests = [Request((), each, each, each) for each in prompts for _ in range(3)]
    rows = [SubmittedRequest(number, "row", each, SamplingParams(), False) for number, each in enumerate(requests)]
    ahead = RenderedAhead(renderer, rows, SamplingParams(), 800)
    given = []
    while ahead.left:
        due = ahead.due()
        if ahead.taken + due > 18 and not renderer.may_go_on.is_set():
            assert len(given) == 3  # three steps began while the seventh prompt was being rendered
            renderer.may_go_on.set()
        assert [
            ahead.next_prompt() is requests[place].input_ids for place in range(ahead.taken, ahead.taken + due)
        ] == ([True] * due)
        given.append(due)
    ahead.close()
    assert sum(given) == len(requests)
    tokens = [100 if place % 3 == 0 else SHARED_TOKENS for place in range(len(requests))]
    for steps in range(1, len(given)):
        so_far = sum(given[:steps])
        assert sum(tokens[:so_far]) >= prompt_tokens_of(steps, 800) > sum(tokens[: so_far - 1])

"""The order in which vLLM gets the requests of families with recurrent layers, without vLLM."""

import torch

from rollout.engine import Request
from rollout.vllm.engine_requests import first_samples_first


def test_the_first_samples_of_prompts_come_first():
    prompts = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3])]
    requests = [Request((), each, each, each) for each in prompts for _ in range(3)]
    assert first_samples_first(requests, 100) == [0, 3, 6, 1, 2, 4, 5, 7, 8]
    assert first_samples_first(requests, 6) == [0, 3, 1, 2, 4, 5, 6, 7, 8]
    assert first_samples_first(requests, 1) == list(range(9))


def test_requests_with_images_stay_in_the_order_of_prompts():
    """Prompts 1 and 3 have an image; vLLM gets the images as they were rendered: 1, 1, 1, 3, 3, 3."""
    prompts = [torch.tensor([number]) for number in range(5)]
    media = [{"image": [object()]} if number in (1, 3) else {} for number in range(5)]
    requests = [
        Request((), each, each, each, multi_modal_data=shown) for each, shown in zip(prompts, media) for _ in range(3)
    ]
    assert first_samples_first(requests, 100) == [0, 3, 4, 5, 6, 9, 10, 11, 12, 1, 2, 7, 8, 13, 14]
    for window in range(1, 16):
        order = first_samples_first(requests, window)
        assert sorted(order) == list(range(15))
        assert [place for place in order if requests[place].multi_modal_data] == [3, 4, 5, 9, 10, 11]

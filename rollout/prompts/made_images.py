"""Which images the inputs of a row were made of, so that episodes of the row do not make them again.

A prompt batch says it in the column `IMAGE_KEYS`. It travels with the batch: what a loader's process has made is found by the
process that plays.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from dataproto.columns import IMAGE_KEYS
from dataproto.vlm.media import MediaLayout
from rollout.prompts.image_processing import Batch, ProcessedImage, inputs_key
from rollout.prompts.videos import ProcessedVideo

Made = dict[bytes, dict[str, Tensor]]
"""The inputs of images, by `inputs_key`."""


def image_keys(
    media: Sequence[ProcessedImage | ProcessedVideo], layout: MediaLayout
) -> list[tuple[bytes, dict[str, int]]]:
    """The value of `IMAGE_KEYS` for a row with these media: for each image its key, and its share of each of the row's inputs."""
    images = [image for each in media for image in (each.images if isinstance(each, ProcessedVideo) else [each])]
    return [
        (inputs_key(image.key, layout), {name: len(tensor) for name, tensor in image.inputs.items()})
        for image in images
    ]


def made_images(row: Mapping[str, Any]) -> Made:
    """The inputs of each image of a row with the columns `IMAGE_KEYS` and ``multi_modal_inputs``.

    Empty for other rows, and for those whose inputs have other lengths by now.

    >>> import torch
    >>> keys = [(b"a", {"pixel_values": 1}), (b"b", {"pixel_values": 2})]
    >>> made_images({"image_keys": keys, "multi_modal_inputs": {"pixel_values": torch.tensor([1, 2, 3])}})
    {b'a': {'pixel_values': tensor([1])}, b'b': {'pixel_values': tensor([2, 3])}}
    """
    keys: Sequence[tuple[bytes, dict[str, int]]] = row.get(IMAGE_KEYS) or ()
    inputs = row.get("multi_modal_inputs") or {}
    if not isinstance(inputs, Mapping):
        return {}
    names = dict.fromkeys(name for _, lengths in keys for name in lengths)
    total = {name: sum(lengths.get(name, 0) for _, lengths in keys) for name in names}
    if any(inputs.get(name) is None or len(inputs[name]) != total[name] for name in names):
        return {}
    if len(keys) == 1:  # the tensors themselves, which rows share
        return {keys[0][0]: {name: inputs[name] for name in names}}
    made: Made = {}
    ends = dict.fromkeys(names, 0)
    for key, lengths in keys:
        made[key] = {name: inputs[name][ends[name] : ends[name] + length] for name, length in lengths.items()}
        ends = {name: end + lengths.get(name, 0) for name, end in ends.items()}
    return made


def joined(parts: Iterable[Made]) -> Made:
    """The images of several rows. One whose inputs differ between rows, because they were changed in some, is left out.

    >>> import torch
    >>> one, other = {"pixel_values": torch.tensor([1])}, {"pixel_values": torch.tensor([0])}
    >>> joined([{b"a": one, b"b": one}, {b"a": other}])
    {b'b': {'pixel_values': tensor([1])}}
    """
    found: Made = {}
    changed = set()
    for part in parts:
        for key, inputs in part.items():
            if not _equal(found.setdefault(key, inputs), inputs):
                changed.add(key)
    return {key: inputs for key, inputs in found.items() if key not in changed}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    if one is other:
        return True
    return one.keys() == other.keys() and all(
        tensor is other[name] or torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def batch_of(made: Mapping[bytes, dict[str, Tensor]]) -> Batch:
    """A batch for `PromptBuilder.one_batch` that holds these images."""
    batch: Batch = {}
    for key, inputs in made.items():
        batch[key] = Future()
        batch[key].set_result(inputs)
    return batch

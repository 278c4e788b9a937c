"""Images to the model's inputs, each distinct image once: the image processor, and what keeps its results.

`ImageCache` keeps inputs by the pixels of an image, `images_by_content` images by the digests of their files. A prompt batch says
in the column `IMAGE_KEYS` which images its inputs were made of, so that episodes of a row do not make them again (`made_images`):
what the process of a loader has made is found by the process that plays.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, ClassVar, Protocol, TypeVar

from PIL import Image
from torch import Tensor
from torch.utils.data import get_worker_info

from dataproto.columns import IMAGE_KEYS
from dataproto.vlm.media import MediaLayout
from rollout.continuation import same_tensors
from rollout.image_features import KeyedInputs, RecentlyUsed

T = TypeVar("T")


class ProcessedMedium(KeyedInputs, Protocol):
    """A medium of a `Prompt`: ``content`` for engines, and the model's ``inputs``. Equal ones have the same ``key``."""

    kind: ClassVar[str]

    @property
    def content(self) -> Any:
        """What ``multi_modal_data`` lists under the ``kind``."""


@dataclass(frozen=True)
class ProcessedImage:
    """An RGB image and the model's inputs for it, such as patches ``(patches, dim)`` float32 and a grid ``(1, 3)`` int64.

    ``key`` identifies the pixels and the settings of the image processor.
    """

    kind: ClassVar[str] = "image"
    key: bytes
    image: Image.Image
    inputs: dict[str, Tensor]

    @property
    def content(self) -> Image.Image:
        """The image."""
        return self.image


def inputs_key(key: bytes, layout: MediaLayout) -> bytes:
    """Identifies the inputs of an image with this key: they also depend on how the model takes them from the processor."""
    return key + f" {type(layout).__module__}.{type(layout).__qualname__}".encode()


def image_key(image: Image.Image, processor: Any, options: Mapping[str, Any]) -> bytes:
    """A digest of everything that the inputs depend on: the pixels, and the processor's class and current settings."""
    settings = [type(processor).__qualname__, processor.to_dict(), options, image.mode, image.size]
    digest = blake2b(json.dumps(settings, sort_keys=True, default=repr).encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.digest()


Batch = dict[bytes, "Future[Any]"]
"""The inputs of the images of a batch, and decoded images, by key; of those too that a thread is making."""


class ImageCache:
    """The inputs of the most recently used images by key, in at most ``max_bytes``.

    It stores copies and returns copies, so that writing into the tensors of one batch changes no other batch. In a worker process
    of a data loader it keeps only that worker's share of the bytes. Unpickled in another process, it is empty.

    >>> import torch
    >>> cache = ImageCache(max_bytes=16)
    >>> for key in (b"a", b"b", b"c"):
    ...     made = cache.inputs(key, lambda: {"pixel_values": torch.ones(2)})
    >>> cache.inputs(b"a", dict), cache.inputs(b"c", dict)
    ({}, {'pixel_values': tensor([1., 1.])})
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._kept: RecentlyUsed[dict[str, Tensor]] = RecentlyUsed(max_bytes, _size)
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def one_batch(self, batch: Batch | None = None) -> Iterator[Batch]:
        """Within this context, `inputs` and `once` make each image once, whatever its size. Threads that work on one batch enter
        it with the same ``batch``, which may hold images that were made before.
        """
        outer = getattr(self._thread, "batch", None)
        self._thread.batch = {} if batch is None else batch
        try:
            yield self._thread.batch
        finally:
            self._thread.batch = outer

    def inputs(self, key: bytes, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The inputs under this key, from the batch, the cache, or ``make()``, whose error it raises."""
        return dict(self.once(key, lambda: self._found_or_made(key, make)))

    def once(self, key: bytes, make: Callable[[], T]) -> T:
        """What the batch holds under this key, or ``make()``, whose error it raises. Outside of a batch nothing is kept."""
        batch: Batch | None = getattr(self._thread, "batch", None)
        if batch is None:
            return make()
        made: Future[T] = Future()
        found: Future[T] = batch.setdefault(key, made)  # atomic: one thread makes it, and the others wait for it
        if found is made:
            try:
                made.set_result(make())
            except BaseException as error:
                batch.pop(key)
                made.set_exception(error)
        return found.result()

    def _found_or_made(self, key: bytes, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """A copy of what is kept; or what was made, of which a copy is kept if the cache has room for it at all."""
        with self._lock:
            entry = self._kept.get(key)
        if entry is not None:
            return _copied(entry)
        inputs, worker = make(), get_worker_info()
        self._kept.max_bytes = self.max_bytes // (1 if worker is None else worker.num_workers)
        if _size(inputs) <= self._kept.max_bytes:
            copied = _copied(inputs)
            with self._lock:
                self._kept[key] = copied
        return inputs

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageCache, (self.max_bytes,)


def _copied(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _size(inputs: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in inputs.values())


Made = dict[bytes, dict[str, Tensor]]
"""The inputs of images, by `inputs_key`."""


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


def batch_of(rows: Iterable[Made]) -> Batch:
    """A batch for `PromptBuilder.one_batch` that holds the images of several rows, but for one whose inputs differ between rows,
    because they were changed in some.

    >>> import torch
    >>> one, other = {"pixel_values": torch.tensor([1])}, {"pixel_values": torch.tensor([0])}
    >>> {key: found.result() for key, found in batch_of([{b"a": one, b"b": one}, {b"a": other}]).items()}
    {b'b': {'pixel_values': tensor([1])}}
    """
    found: Made = {}
    changed = set()
    for row in rows:
        for key, inputs in row.items():
            if not same_tensors(found.setdefault(key, inputs), inputs):
                changed.add(key)
    batch: Batch = {key: Future() for key in found if key not in changed}
    for key, made in batch.items():
        made.set_result(found[key])
    return batch


def images_by_content(max_bytes: int) -> RecentlyUsed[ProcessedImage]:
    """A store of the most recently used images, in at most ``max_bytes`` of pixels and inputs."""

    def size(image: ProcessedImage) -> int:
        return image.image.width * image.image.height * len(image.image.getbands()) + _size(image.inputs)

    return RecentlyUsed(max_bytes, size)

"""Processed images by the bytes of their files, so that an image that is sent again is neither decoded nor processed again."""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from hashlib import blake2b

from rollout.prompts.image_processing import ProcessedImage

Key = bytes | str


class ContentStore(MutableMapping[Key, ProcessedImage]):
    """The most recently used images, in at most ``max_bytes`` of pixels; the last one is always kept.

    A key is the bytes of a file, of which the digest is stored, or the location of an asset.

    >>> store = ContentStore(max_bytes=0)
    >>> len(store), b"a file" in store
    (0, False)
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._images: OrderedDict[Key, ProcessedImage] = OrderedDict()

    def __getitem__(self, key: Key) -> ProcessedImage:
        found = self._images[_short(key)]
        self._images.move_to_end(_short(key))
        return found

    def __setitem__(self, key: Key, image: ProcessedImage) -> None:
        self.pop(key, None)
        self._images[_short(key)] = image
        self.bytes += _size(image)
        while self.bytes > self.max_bytes and len(self._images) > 1:
            self.bytes -= _size(self._images.popitem(last=False)[1])

    def __delitem__(self, key: Key) -> None:
        self.bytes -= _size(self._images.pop(_short(key)))

    def __iter__(self) -> Iterator[Key]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)


def _short(key: Key) -> Key:
    return blake2b(key, digest_size=32).digest() if isinstance(key, bytes) else key


def _size(image: ProcessedImage) -> int:
    pixels = image.image.width * image.image.height * len(image.image.getbands())
    return pixels + sum(tensor.nbytes for tensor in image.inputs.values())

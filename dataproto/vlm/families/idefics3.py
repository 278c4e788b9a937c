"""Idefics3 and SmolVLM: a SigLIP tower, a Llama decoder, one-dimensional positions.

An image is resized and cut into square tiles of one size, and the whole image is added as one more tile. In the prompt each tile
follows a token that names its row and column; an image that fits into one tile is only that tile.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, InvalidMedia
from dataproto.vlm.costs import siglip_flops
from dataproto.vlm.family import DECODER_PLAN, VLMFamily
from dataproto.vlm.media import EqualImages, Options, PartedImages, check_limits

MAX_SIDE = 4096
"""The longest side in pixels that the image processors resize to."""
ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
]
TENS = ["", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def tile_grid(height: int, width: int, longest_edge: int, tile: int) -> tuple[int, int]:
    """Rows and columns of tiles of an image of this size, or ``(0, 0)`` if it becomes one tile.

    The processor resizes the image, smaller ones too, until its longest side has ``longest_edge`` pixels, and then both sides to
    multiples of ``tile``. The arithmetic, rounding included, is the processor's.

    >>> tile_grid(480, 640, longest_edge=2048, tile=512), tile_grid(480, 640, longest_edge=512, tile=512)
    ((3, 4), (0, 0))
    """
    wide, (long, short) = width >= height, (max(height, width), min(height, width))
    aspect = width / height
    short = _other_side(longest_edge, aspect, wide)
    long, short = longest_edge, max(short + short % 2, 1)
    height, width = (short, long) if wide else (long, short)
    wide, aspect = width >= height, width / height
    if max(height, width) > MAX_SIDE:
        short = max(_other_side(MAX_SIDE, aspect, wide), 1)
        height, width = (short, MAX_SIDE) if wide else (MAX_SIDE, short)
        wide, aspect = width >= height, width / height
    long = math.ceil(max(height, width) / tile)
    short = math.ceil(_other_side(long * tile, aspect, wide) / tile)
    rows, columns = (short, long) if wide else (long, short)
    return (0, 0) if rows == columns == 1 else (rows, columns)


def number_words(number: int) -> str:
    """A number from 0 to 999 in English words, as the package num2words writes it. Raises `InvalidMedia` for another one.

    >>> number_words(8), number_words(64), number_words(120)
    ('eight', 'sixty-four', 'one hundred and twenty')
    """
    if not 0 <= number <= 999:
        raise InvalidMedia(f"a video of {number} frames has too many: at most 999")
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    small = ONES[rest] if rest < 20 else TENS[tens] + (f"-{ONES[ones]}" if ones else "")
    if not hundreds:
        return small
    return f"{ONES[hundreds]} hundred" + (f" and {small}" if rest else "")


def _other_side(side: int, aspect: float, wide: bool) -> int:
    """The shorter side in pixels of an image whose longer side is ``side``; ``aspect`` is its width over its height."""
    return int(side / aspect) if wide else int(side * aspect)


class SquareTiles(PartedImages, EqualImages):
    """Tiles ``(tiles, 1, 3, size, size)`` of all images, one image after another: a batch of one image each for the forward of
    Hugging Face. A row also has ``image_tiles``. Images are processed one at a time, so no tile is padding.
    """

    parts_name = "image_tiles"

    def merge_size(self, config: Any) -> int:
        """Patches along each side of the "pixel shuffle", which joins neighbouring patches."""
        return int(config.scale_factor)

    def shape(self, config: Any) -> tuple[int, ...]:
        """Of a tile."""
        return (1, 3, int(config.vision_config.image_size), int(config.vision_config.image_size))

    def processor_options(self, processor: Any, min_pixels: int | None, max_pixels: int | None) -> dict[str, Any]:
        """Limits become a number of tiles along the longest side, whose square is the largest area."""
        edge, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        if not edge:
            raise InvalidConfig(f"the image processor's size {dict(processor.size)} has no longest_edge")
        if min_pixels is not None or max_pixels is not None:
            least = 1 if min_pixels is None else min_pixels
            most = max(least, MAX_SIDE**2) if max_pixels is None else max_pixels
            check_limits(least, most)
            tiles = max(edge // tile, math.ceil(math.sqrt(least) / tile))
            edge = tile * max(1, min(tiles, math.isqrt(most) // tile, MAX_SIDE // tile))
        return {"size": {"longest_edge": int(edge)}, "return_row_col_info": True}

    def image_inputs(self, made: Mapping[str, Any]) -> dict[str, Tensor]:
        """From ``(1, tiles, 3, size, size)``."""
        tiles = torch.tensor([[made["rows"][0][0], made["cols"][0][0]]])
        return {"pixel_values": made["pixel_values"][0].unsqueeze(1), "image_tiles": tiles}

    def image_tiles(self, height: int, width: int, processor: Any, options: Options) -> tuple[int, int]:
        """Rows and columns of tiles of an image of this size, see `tile_grid`."""
        found = tile_grid(height, width, options["size"]["longest_edge"], processor.max_image_size["longest_edge"])
        return found if processor.do_image_splitting else (0, 0)

    def count_image_features(self, height: int, width: int, processor: Any, options: Options, config: Any) -> int:
        """Computed by `tile_grid`."""
        rows, columns = self.image_tiles(height, width, processor, options)
        side = config.vision_config.image_size // config.vision_config.patch_size // self.merge_size(config)
        return (rows * columns + 1) * int(side) ** 2

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """One tile."""
        return super().smallest(config) | {"image_tiles": torch.zeros(1, 2, dtype=torch.int64)}


class Idefics3(VLMFamily):
    """Idefics3."""

    model_type = "idefics3"
    published: tuple[str, ...] = ("Idefics3",)
    media_layout = TILES = SquareTiles()
    image_text = ("<fake_token_around_image><global-img>", "<fake_token_around_image>")
    typed_content = True
    mrope = False
    vision_tower = "model.vision_model"
    vision_blocks = "model.vision_model.encoder.layers"
    mergers = ("model.connector",)
    language_model = "model.text_model"
    embedding = "model.text_model.embed_tokens"
    decoder_layers = "model.text_model.layers"
    final_norm = "model.text_model.norm"
    tensor_plan = tuple((path.replace("language_model", "text_model"), style) for path, style in DECODER_PLAN)

    def image_texts(self, media: Mapping[str, Any], config: Any) -> list[tuple[str, ...]]:
        """From the tiles of each image."""
        return [self._texts(*tiles) for tiles in media["image_tiles"].tolist()] if "image_tiles" in media else []

    def size_texts(self, height: int, width: int, processor: Any, options: Options) -> tuple[str, ...]:
        """From the tiles of an image of this size."""
        return self._texts(*self.TILES.image_tiles(height, width, processor, options))

    def _texts(self, rows: int, columns: int) -> tuple[str, ...]:
        """Each tile's row and column, a line break after each row of tiles, and the whole image after an empty line."""
        whole, end = self.image_text
        if not rows:
            return self.image_text
        tiles = [
            ("\n" if row and not column else "") + f"{end}<row_{row + 1}_col_{column + 1}>"
            for row in range(rows)
            for column in range(columns)
        ]
        return (*tiles, f"\n\n{whole}", end)

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, H)`` after the tower and the connector.

        Hugging Face's own method drops tiles that are all zero, which it takes for padding: a white image can be zero. Here every
        tile has features, as many as its prompt has placeholders.
        """
        tower, connector = (model.get_submodule(path) for path in (self.vision_tower, *self.mergers))
        pixels = media["pixel_values"].flatten(0, 1).to(next(tower.parameters()).dtype)
        size = int(model.config.vision_config.patch_size)
        sides = [side // size for side in pixels.shape[2:]]
        # The tower would make this mask on the host, and wait for its copy.
        mask = torch.ones(len(pixels), *sides, dtype=torch.bool, device=pixels.device)
        states = tower(pixels, patch_attention_mask=mask, **vision_kwargs).last_hidden_state
        features: Tensor = connector(states).flatten(0, 1)
        return features

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The number of tokens of a tile."""
        features = self.feature_counts(self.dummy_media(config), config)[0]
        return {"processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": features}}

    def rollout_media(self, media: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        """Tiles ``(tiles, 3, size, size)``, all of whose pixels count, and the number of tiles of each image ``(images,)``."""
        tiles = media["pixel_values"].flatten(0, 1)
        return {
            "pixel_values": tiles,
            "pixel_attention_mask": torch.ones(len(tiles), *tiles.shape[2:], dtype=torch.bool),
            "num_patches": media["image_tiles"].prod(1) + 1,
        }

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Full attention within a tile; the connector is one matrix."""
        vision, merge = config.vision_config, self.merge_size(config)
        # A feature joins the patches of a square and is multiplied with a row of weights for each of them.
        connector = merge**2 * int(vision.hidden_size * config.text_config.hidden_size)
        return siglip_flops(vision, grids, connector, merge)


class SmolVLM(Idefics3):
    """SmolVLM and SmolVLM2: Idefics3 with a smaller tower and more patches joined into a feature, and with videos."""

    model_type = "smolvlm"
    published: tuple[str, ...] = ("SmolVLM", "SmolVLM2")
    frames_as_images = True

    def frame_captions(self, seconds: Sequence[float], duration: float) -> list[str]:
        """Number of frames and duration before all, and each frame's time in minutes and seconds before it."""
        hours, minutes = divmod(int(duration) // 60, 60)
        intro = (
            f"You are provided the following series of {number_words(len(seconds))} frames from a "
            f"{hours}:{minutes:02d}:{int(duration) % 60:02d} [H:MM:SS] video.\n"
        )
        times = [f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:" for second in seconds]
        return [intro + times[0], *times[1:], "\n\n"] if times else [f"{intro}\n\n"]

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """The number of tokens of a tile, and the processor of videos, without which there is no SmolVLMProcessor."""
        (settings,) = super().processor_files(config).values()
        side = {"longest_edge": config.vision_config.image_size}
        video = {"video_processor_type": "SmolVLMVideoProcessor", "size": side, "max_image_size": side}
        return {
            "processor_config.json": settings | {"processor_class": "SmolVLMProcessor"},
            "video_preprocessor_config.json": video,
        }

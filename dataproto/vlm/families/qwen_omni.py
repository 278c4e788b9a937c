"""The thinkers of Qwen2.5-Omni and Qwen3-Omni: Qwen-VL with a tower for sound. The talker, which speaks, is no part of them."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dataproto.errors import MediaMismatch
from dataproto.vlm.families.kimi_k25 import apart
from dataproto.vlm.families.qwen2_5_vl import Qwen25VL
from dataproto.vlm.families.qwen3_vl import Qwen3VLMoe
from dataproto.vlm.family import VLMFamily, moved, transformers_release
from dataproto.vlm.media import Ids, PatchGrids
from dataproto.vlm.positions import AUDIO, IMAGE, VIDEO
from dataproto.vlm.prompt_layout import MediaTokens


@dataclass(frozen=True)
class SoundAndGrids(PatchGrids):
    """`PatchGrids`, and sounds as mel frames ``input_features (frames, mel)``, one sound after another, with the numbers of
    their frames ``audio_feature_lengths (sounds,)``.
    """

    audio_names: ClassVar[tuple[str, ...]] = ("input_features", "audio_feature_lengths")
    fewest: ClassVar[int] = 3
    """Frames of the shortest sound that the tower reads."""

    def sound_features(self, frames: Tensor) -> Tensor:
        """How many features the tower makes of sounds of so many frames: a convolution and a pooling, both of stride 2.

        >>> SoundAndGrids().sound_features(torch.tensor([3, 4, 7, 8, 200])).tolist()
        [1, 1, 2, 2, 50]
        """
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """Of a sound ``(1, 1, frames)``."""
        if kind != "audio":
            return super().grids(kind, inputs, config)
        frames, lengths = (inputs.get(name) for name in self.audio_names)
        if lengths is None:
            return torch.zeros(0, 3, dtype=torch.int64)
        lengths = torch.as_tensor(lengths).long()
        if lengths.ndim != 1 or bool((lengths < self.fewest).any()):
            raise MediaMismatch(
                f"audio_feature_lengths {lengths.tolist()}: the tower needs {self.fewest} mel frames of each sound, one for 10 ms"
            )
        if frames is not None and int(lengths.sum()) != len(frames):
            raise MediaMismatch(
                f"audio_feature_lengths {lengths.tolist()} count {int(lengths.sum())} mel frames, but there are {len(frames)}"
            )
        return torch.stack([torch.ones_like(lengths), torch.ones_like(lengths), lengths], 1)

    def grid_features(self, grids: Tensor, config: Any) -> Tensor:
        """Of sounds by `sound_features`."""
        return torch.where(are_sounds(grids), self.sound_features(grids[:, 2]), super().grid_features(grids, config))

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature and a sound of one."""
        return {
            **super().smallest(config),
            "input_features": torch.zeros(self.fewest, config.audio_config.num_mel_bins),
            "audio_feature_lengths": torch.tensor([self.fewest]),
        }


class LongerSounds(SoundAndGrids):
    """With the sounds of Qwen3-Omni, a second of which becomes 13 features."""

    fewest = 1

    def sound_features(self, frames: Tensor) -> Tensor:
        """Three convolutions of stride 2 on chunks of 100 frames.

        >>> LongerSounds().sound_features(torch.tensor([1, 8, 9, 100, 101, 200])).tolist()
        [1, 1, 2, 13, 14, 26]
        """
        return frames // 100 * 13 + (frames % 100 + 7) // 8


def are_sounds(grids: Tensor) -> Tensor:
    """Which of ``grids (N, 3)`` are of sounds: sides of images are whole features of several patches."""
    return grids[:, 1] == 1


FamilyClass = TypeVar("FamilyClass", bound=type[VLMFamily])
NEWEST_FLAT = (5, 20)
"""Up to this release of transformers towers and decoder are no parts of ``model``."""


def with_own_paths(family: FamilyClass) -> FamilyClass:
    """The family with the module paths of the transformers that is installed."""

    def flat(path: Any) -> Any:
        if isinstance(path, tuple):
            return tuple(map(flat, path))
        nested = isinstance(path, str) and path.startswith("model.")
        return path.replace("model.", "", 1).replace("language_model", "model", 1) if nested else path

    for name in _PATHS if transformers_release() <= NEWEST_FLAT else ():
        setattr(family, name, flat(getattr(family, name)))
    return family


_PATHS = (
    *("vision_tower", "vision_blocks", "mergers", "audio_tower", "audio_blocks", "language_model", "embedding"),
    *("decoder_layers", "final_norm", "tensor_plan", "experts"),
)


class Thinker(VLMFamily):
    """What the thinkers share. Both towers are frozen and trained together."""

    part = "thinker"
    needs_transformers = (5, 19)
    unused_weights = ("talker.*", "token2wav.*", "code2wav.*")
    unused_files = ("spk_dict.pt",)
    media_layout: SoundAndGrids
    audio_tower = "model.audio_tower"
    audio_blocks = "model.audio_tower.layers"
    checkpoint_names: tuple[tuple[str, str], ...] = (
        (r"^model\.language_model\.", "thinker.model."),
        (r"^model\.(visual|audio_tower)\.", r"thinker.\1."),
        (r"^(?!thinker\.)", "thinker."),
    )
    shared_ends: bool = False
    """Around a video with its sound, the two tokens before them have one position, and so have the two after them."""

    @abstractmethod
    def sound_arguments(self, tower: Any, frames: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Keywords of the tower for ``frames (F, mel)`` of sounds of these ``lengths (N,)``, which are on the host as all that
        only depends on them: the host need not wait for the device.
        """

    @abstractmethod
    def sound_flops(self, audio: Any, frames: Tensor) -> Tensor:
        """Operations ``(N, 2)`` int64, linear and attention, for sounds of ``frames (N,)``, by the config of the tower."""

    def in_order(self, times: Iterable[float], config: Any) -> Iterable[float]:
        """The order of the tokens at these ascending ``times``, in positions, of a video or of its sound. Default: the times."""
        return times

    def joined_run(self, grid: Sequence[int], seconds: float, heard: int, config: Any) -> list[int]:
        """The placeholders of a video of patches (time, height, width) and of the ``heard`` features of its sound, by their time;
        of equal ones the video comes first.
        """
        tokens, rate = self.media_tokens(config), float(config.position_id_per_seconds)
        features = grid[1] * grid[2] // self.merge_size(config) ** 2
        shown = self.in_order([step * seconds * rate for step in range(grid[0]) for _ in range(features)], config)
        played = self.in_order(range(heard), config)
        ordered = sorted([*((order, 0) for order in shown), *((order, 1) for order in played)])
        return [int((tokens.video, tokens.audio)[kind]) for _, kind in ordered]  # type: ignore[arg-type]

    def expand(
        self,
        ids: Sequence[int] | Ids,
        media: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        config: Any,
        **options: Any,
    ) -> tuple[Ids, np.ndarray[Any, np.dtype[np.int8]]]:
        """A video with its sound, one element of a list of ``media``, becomes their `joined_run` between the ends of a sound."""
        parts = [] if isinstance(media, Mapping) else media
        videos = [part for part in parts if part.get("video_grid_thw") is not None]
        joined = [part for part in videos if part.get("input_features") is not None]
        raw, placeholder = np.array(ids, dtype=np.int64), self.media_tokens(config).video
        places = np.flatnonzero(raw == placeholder)
        if not joined or len(places) != len(videos):
            return super().expand(ids, media, config, **options)
        raw[places[[any(part is own for own in joined) for part in videos]]] = -1
        rest = [part for part in parts if not any(part is own for own in joined)]
        made, types = super().expand(raw, rest, config, **options)
        runs = [np.array(self._between_ends(part, config), dtype=np.int64) for part in joined]
        lengths = np.ones_like(made)
        lengths[made == -1] = list(map(len, runs))
        found, kinds = np.repeat(made, lengths), np.repeat(types, lengths)
        kinds[found == -1] = self.token_types(torch.from_numpy(np.concatenate(runs)), config).numpy()
        found[found == -1] = np.concatenate(runs)
        return found, kinds

    def _between_ends(self, part: Mapping[str, Any], config: Any) -> list[int]:
        """The tokens of a video with its sound, and those that begin and end a sound."""
        heard = int(self.media_layout.feature_counts("audio", part, config).sum())
        run = self.joined_run(part["video_grid_thw"][0].tolist(), float(part["second_per_grid_ts"][0]), heard, config)
        return [config.audio_start_token_id, *run, config.audio_end_token_id]

    def media_tokens(self, config: Any) -> MediaTokens:
        """With that of sound."""
        return replace(super().media_tokens(config), audio=config.audio_token_id)

    def vision_flops(self, config: Any, grids: Tensor) -> Tensor:
        """Of sounds those of their tower."""
        seen = super().vision_flops(config, grids)  # type: ignore[safe-super]
        return torch.where(are_sounds(grids)[:, None], self.sound_flops(config.audio_config, grids[:, 2]), seen)

    def features(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, levels, H)`` of images, videos, then sounds, whose further levels are 0.

        Both towers run, so that every rank makes the same collective calls: where a kind is absent, the features of the smallest
        medium are dropped.
        """
        names = self.media_layout.audio_names
        smallest = self.media_layout.smallest(model.config)
        shown = {name: value for name, value in media.items() if name not in names}
        seen = super().features(
            model, shown or {name: smallest[name] for name in self.media_layout.image_names}, **vision_kwargs
        )
        frames, lengths = (media.get(name, smallest[name]) for name in names)
        tower = model.get_submodule(self.audio_tower)
        made = self.sound_arguments(tower, frames.to(seen.device), lengths.cpu())
        heard = tower(**moved(made, seen.device)).last_hidden_state
        heard = pad(heard[:, None], (0, 0, 0, seen.shape[1] - 1))
        if not shown:
            return torch.cat([heard, seen])[: len(heard)]
        return torch.cat([seen, heard])[: len(seen) + (len(heard) if names[0] in media else 0)]

    def rollout_media(self, media: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        """Mel frames next to each other, and which of them each sound has, padded to the longest."""
        made = dict(media)
        if (frames := made.pop("input_features", None)) is not None:
            lengths = made["audio_feature_lengths"]
            mask = torch.arange(int(lengths.max())) < lengths[:, None]
            made |= {"input_audio_features": frames.T, "feature_attention_mask": mask.long()}
        return made

    # Positions

    def position_ids(
        self,
        token_types: Tensor,
        attention_mask: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        second_per_grid_ts: Tensor | Sequence[float] | None,
        config: Any,
    ) -> Tensor:
        """Sound counts on as text does. Where tokens of a video and of sound stand in one run, the sound is the video's: both
        start at one position. The text after a video comes after its last time step.
        """
        merge = config.vision_config.spatial_merge_size
        images, videos = (
            iter([] if grids is None else (grids.long().cpu() // grids.new_tensor([1, merge, merge]).cpu()).tolist())
            for grids in (image_grid_thw, video_grid_thw)
        )
        if second_per_grid_ts is None and video_grid_thw is not None:
            second_per_grid_ts = [1.0] * len(video_grid_thw)
        seconds = iter(() if second_per_grid_ts is None else second_per_grid_ts)
        attended = attention_mask.bool().cpu()
        positions = torch.zeros(len(token_types), 4, token_types.shape[-1], dtype=torch.int64)
        for row, (types, kept) in enumerate(zip(token_types.cpu(), attended)):
            own = types[kept]
            try:
                places = self._row_positions(own, images, videos, seconds, config.position_id_per_seconds)
            except StopIteration:
                raise MediaMismatch(f"row {row}: more media tokens than the grids of images and videos count") from None
            positions[row, 0, kept] = torch.arange(len(own))
            positions[row, 1:, kept] = places
        if next(images, None) is not None or next(videos, None) is not None:
            raise MediaMismatch("the grids of images and videos count more tokens than the rows have")
        return positions.to(token_types.device)

    def _row_positions(self, types: Tensor, images: Any, videos: Any, seconds: Any, rate: float) -> Tensor:
        """Positions ``(3, n)`` of the attended tokens of a row, of these types."""
        out = torch.zeros(3, len(types), dtype=torch.int64)
        values, counts = torch.unique_consecutive(types != 0, return_counts=True)
        place = following = 0
        joined = False  # the run before is of a video with its sound, whose ends have one position
        for media, length in zip(values.tolist(), counts.tolist()):
            run, block = types[place : place + length], torch.arange(length).expand(3, -1).clone()
            shown, heard = run != AUDIO, run == AUDIO
            if media and bool(shown.any()):
                kind = int(run[shown][0])
                grid, step = (next(images), 1.0) if kind == IMAGE else (next(videos), float(next(seconds)))
                tokens = grid_places(grid, step, rate)
                if tokens.shape[-1] != int(shown.sum()):
                    raise MediaMismatch(
                        f"a run of {int(shown.sum())} media tokens, but its grid counts {tokens.shape[-1]}"
                    )
                block[:, shown], block[:, heard] = tokens, torch.arange(int(heard.sum()))
            if joined and not media:
                block[:, 1:] -= 1
            joined = self.shared_ends and bool(media) and bool((run == VIDEO).any()) and bool(heard.any())
            if joined:
                out[:, place - 1] -= 1
                following -= 1
            out[:, place : place + length] = block + following
            following += int(block.max()) + 1
            place += length
        return out


def grid_places(grid: Sequence[int], seconds: float, rate: float) -> Tensor:
    """Time, height and width ``(3, K)`` of the tokens of a grid, whose time steps are so many seconds apart, in whole
    positions.

    >>> grid_places([2, 1, 2], 0.5, 25).tolist()
    [[0, 0, 12, 12], [0, 0, 0, 0], [0, 1, 0, 1]]
    """
    time, height, width = grid
    steps = (torch.arange(time) * torch.tensor(seconds).float() * rate).long()
    return torch.cartesian_prod(steps, torch.arange(height), torch.arange(width)).T


@with_own_paths
class Qwen25OmniThinker(Thinker, Qwen25VL):
    """Qwen2.5-Omni's thinker."""

    model_type = "qwen2_5_omni_thinker"
    published = ("Qwen2.5-Omni-3B", "Qwen2.5-Omni-7B")
    media_layout = SoundAndGrids()
    shared_ends = True
    checkpoint_names = Thinker.checkpoint_names

    def in_order(self, times: Iterable[float], config: Any) -> list[int]:
        """Numbers of chunks of two seconds. Each token is in the chunk of the one before it, or in the next one.

        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(position_id_per_seconds=25, seconds_per_chunk=2)
        >>> Qwen25OmniThinker().in_order([0, 49, 50, 170, 170], config)
        [0, 0, 1, 2, 3]
        """
        size, number, found = int(config.position_id_per_seconds * config.seconds_per_chunk), 0, []
        for time in times:
            number += time >= (number + 1) * size
            found.append(number)
        return found

    def sound_arguments(self, tower: Any, frames: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Chunks of ``2 * n_window`` frames, of which each is a segment of attention."""
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as hf

        padded, chunks = hf.chunk_and_pad_features(frames.T, lengths, tower.n_window)
        bounds = hf.get_audio_cu_seqlens(chunks)
        return {
            "padded_feature": padded,
            "chunk_lengths": chunks,
            "valid_indices": hf.get_valid_indices(chunks),
            "pool_indices": hf.get_pool_indices(lengths),
            "cu_seqlens": bounds,
            "max_seqlen": int(bounds.diff().max()),
        }

    def sound_flops(self, audio: Any, frames: Tensor) -> Tensor:
        """A convolution on all frames, one on every second, blocks with attention within a chunk, and a projection of means."""
        width, window = int(audio.d_model), int(audio.n_window)
        half = (frames + 1) // 2
        block = 4 * width**2 + 2 * width * int(audio.encoder_ffn_dim)
        linear = frames * 3 * int(audio.num_mel_bins) * width + half * (
            3 * width**2 + int(audio.encoder_layers) * block
        )
        linear = linear + half // 2 * width * int(audio.output_dim)
        pairs = (half // window) * window**2 + (half % window) ** 2
        return torch.stack([2 * linear, 4 * width * int(audio.encoder_layers) * pairs], 1)


@with_own_paths
class Qwen3OmniMoeThinker(Thinker, Qwen3VLMoe):
    """Qwen3-Omni's thinker. Sounds have no deep features."""

    model_type = "qwen3_omni_moe_thinker"
    published = ("Qwen3-Omni-30B-A3B-Instruct", "Qwen3-Omni-30B-A3B-Thinking", "Qwen3-Omni-30B-A3B-Captioner")
    media_layout = LongerSounds()
    videos_by_frame = False
    rollout_weight = VLMFamily.rollout_weight

    def rollout_weights(self, weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
        """Published checkpoints hold each expert by itself."""
        for name, weight in super().rollout_weights(weights, config):
            yield from apart(name, weight) if ".mlp.experts." in name else ((name, weight),)

    def rollout_config(self, config: Any) -> dict[str, Any]:
        """That the vision tower has learned positions, and how many: by the side of a picture in pixels, as published.

        >>> from types import SimpleNamespace
        >>> vision = SimpleNamespace(num_position_embeddings=2304, patch_size=16)
        >>> Qwen3OmniMoeThinker().rollout_config(SimpleNamespace(vision_config=vision))["vision_config"]["image_size"]
        768
        """
        vision = config.vision_config
        side = isqrt(int(vision.num_position_embeddings)) * int(vision.patch_size)
        return {"vision_config": {"image_size": side, "apply_vit_abs_pos_embed": True}}

    def sound_arguments(self, tower: Any, frames: Tensor, lengths: Tensor) -> dict[str, Any]:
        """Chunks of ``2 * n_window`` frames, and windows of several chunks, which are the segments of attention.

        Each chunk is filled up to its whole length. Hugging Face fills them up to the longest chunk of a batch, so that the last
        feature of a sound of less than a second depends on the sounds next to it.
        """
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as hf

        window, whole = int(tower.n_window), torch.tensor([2 * int(tower.n_window)])
        padded, chunks = hf.chunk_and_pad_features(frames.T, lengths, window)
        made = self.media_layout.sound_features(chunks)
        most = int(self.media_layout.sound_features(whole))
        bounds = hf.get_audio_cu_seqlens(whole, lengths, int(tower.n_window_infer), window)
        return {
            "padded_feature": pad(padded, (0, int(whole) - padded.shape[-1])),
            "chunk_lengths": chunks,
            "valid_indices": (torch.arange(most) < made[:, None]).flatten().nonzero().squeeze(-1),
            "cu_seqlens": bounds,
            "max_seqlen": int(bounds.diff().max()),
        }

    def sound_flops(self, audio: Any, frames: Tensor) -> Tensor:
        """Three convolutions of stride 2 over time and mel bins of whole chunks, and blocks with attention within a window."""
        width, channels, chunk = int(audio.d_model), int(audio.downsample_hidden_size), 2 * int(audio.n_window)
        (first, *others), bins = halved(chunk), halved(int(audio.num_mel_bins))
        convolved = 9 * channels * (first * bins[0] + channels * sum(map(int.__mul__, others, bins[1:])))
        embedded = (frames + chunk - 1) // chunk * (convolved + others[-1] * bins[-1] * channels * width)
        features = self.media_layout.sound_features(frames)
        block = 4 * width**2 + 2 * width * int(audio.encoder_ffn_dim)
        linear = embedded + features * (int(audio.encoder_layers) * block + width**2 + width * int(audio.output_dim))
        window = int(audio.n_window_infer) // chunk * others[-1]
        pairs = (features // window) * window**2 + (features % window) ** 2
        return torch.stack([2 * linear, 4 * width * int(audio.encoder_layers) * pairs], 1)


def halved(size: int) -> list[int]:
    """A size after each of three convolutions of stride 2.

    >>> halved(100)
    [50, 25, 13]
    """
    return [size := (size + 1) // 2 for _ in range(3)]

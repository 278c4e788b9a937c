"""The thinker of Qwen2.5-Omni: Qwen2.5-VL with a tower for sound. The talker, which speaks, is no part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dataproto.errors import MediaMismatch
from dataproto.vlm.families.qwen2_5_vl import Qwen25VL
from dataproto.vlm.family import pooled
from dataproto.vlm.media import Ids, PatchGrids
from dataproto.vlm.positions import AUDIO, IMAGE, VIDEO
from dataproto.vlm.prompt_layout import MediaTokens


def sound_features(frames: Tensor) -> Tensor:
    """How many features the tower makes of sounds of so many mel frames: a convolution and a pooling, both of stride 2.

    >>> sound_features(torch.tensor([3, 4, 7, 8, 200])).tolist()
    [1, 1, 2, 2, 50]
    """
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


@dataclass(frozen=True)
class SoundAndGrids(PatchGrids):
    """`PatchGrids`, and sounds as mel frames ``input_features (frames, mel)``, one sound after another, with the numbers of
    their frames ``audio_feature_lengths (sounds,)``.
    """

    audio_names: ClassVar[tuple[str, ...]] = ("input_features", "audio_feature_lengths")

    def grids(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Tensor:
        """Sounds have none."""
        return torch.zeros(0, 3, dtype=torch.int64) if kind == "audio" else super().grids(kind, inputs, config)

    def feature_counts(self, kind: str, inputs: Mapping[str, Any], config: Any) -> Ids:
        """Of sounds by `sound_features`."""
        if kind != "audio" or inputs.get("audio_feature_lengths") is None:
            return super().feature_counts(kind, inputs, config)
        lengths, frames = torch.as_tensor(inputs["audio_feature_lengths"]).long().cpu(), inputs.get("input_features")
        if lengths.ndim != 1 or bool((lengths < 3).any()):
            raise MediaMismatch(f"audio_feature_lengths {lengths.tolist()}: the tower needs 3 mel frames of each sound")
        if frames is not None and int(lengths.sum()) != len(frames):
            raise MediaMismatch(
                f"audio_feature_lengths {lengths.tolist()} count {int(lengths.sum())} mel frames, but there are {len(frames)}"
            )
        return np.asarray(sound_features(lengths))

    def smallest(self, config: Any) -> dict[str, Tensor]:
        """An image of one feature and a sound of one."""
        sound = torch.zeros(3, config.audio_config.num_mel_bins)
        return {**super().smallest(config), "input_features": sound, "audio_feature_lengths": torch.tensor([3])}


class Qwen25OmniThinker(Qwen25VL):
    """Qwen2.5-Omni's thinker.

    It is not in the registry: kept features and ranks that split the towers' work (sp x tp) do not count sounds, and no column of
    a data set has them. Only programs that compute on one rank may use the class, as the tests do.
    """

    model_type = "qwen2_5_omni_thinker"
    published = ()
    auto_model = "Qwen2_5OmniThinkerForConditionalGeneration"
    media_layout = SoundAndGrids()
    mergers = ("model.visual.merger", "model.audio_tower")
    """The tower for sound is frozen and trained as the other."""

    def media_tokens(self, config: Any) -> MediaTokens:
        """With that of sound."""
        return MediaTokens(
            config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id,
            config.audio_token_id,
        )  # fmt: skip

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
        """Features ``(F, H)`` of images, videos, then sounds. Both towers run, so that every rank makes the same collective
        calls: of a kind that is absent on the smallest medium, whose feature comes last and is placed nowhere.
        """
        tower = model.get_submodule("model.audio_tower")
        weight = next(tower.parameters())
        smallest = {name: value.to(weight.device) for name, value in self.media_layout.smallest(model.config).items()}
        heard = media if "input_features" in media else smallest
        shown = any(name.endswith("grid_thw") for name in media)
        lengths = heard["audio_feature_lengths"]
        sounds = tower(heard["input_features"].T.to(weight.dtype), feature_lens=lengths).last_hidden_state
        images_and_videos = media if shown else smallest
        seen = {name: x for name, x in images_and_videos.items() if name not in self.media_layout.audio_names}
        images = pooled(super().tower_output(model, seen, **vision_kwargs))
        return torch.cat([images, sounds] if shown else [sounds, images])

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
        start at one position, and so do the two tokens before them and the two after them. The text after a video comes after
        its last time step.
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
        values, counts = torch.unique_consecutive(
            (types == IMAGE) | (types == VIDEO) | (types == AUDIO), return_counts=True
        )
        place = following = 0
        paired = False
        for media, length in zip(values.tolist(), counts.tolist()):
            run, block = types[place : place + length], torch.arange(length).expand(3, -1).clone()
            if media and bool((run == VIDEO).any()) and bool((run == AUDIO).any()):
                out[:, place - 1] -= 1
                following -= 1
                block[:, run == AUDIO] = torch.arange(int((run == AUDIO).sum()))
                shown = grid_places(next(videos), float(next(seconds)), rate)
                if shown.shape[-1] != int((run == VIDEO).sum()):
                    raise MediaMismatch(
                        f"{int((run == VIDEO).sum())} video tokens, but the grid counts {shown.shape[-1]}"
                    )
                block[:, run == VIDEO] = shown
                paired = True
            elif media and not bool((run == AUDIO).all()):
                kind = int(run[0])
                grid, step = (next(images), 1.0) if kind == IMAGE else (next(videos), float(next(seconds)))
                block = grid_places(grid, step, rate)
            elif not media and paired:
                block[:, 1:] -= 1
                paired = False
            if block.shape[-1] != length:
                raise MediaMismatch(f"a run of {length} media tokens, but its grid counts {block.shape[-1]}")
            out[:, place : place + length] = block + following
            following += int(block.max()) + 1
            place += length
        return out


def grid_places(grid: Sequence[int], seconds: float, rate: float) -> Tensor:
    """Time, height and width ``(3, K)`` of the tokens of a grid, whose time steps are so many seconds apart.

    >>> grid_places([2, 1, 2], 0.5, 25).tolist()
    [[0, 0, 12, 12], [0, 0, 0, 0], [0, 1, 0, 1]]
    """
    time, height, width = grid
    steps = (torch.arange(time) * torch.tensor(seconds).float() * rate).long()
    return torch.cartesian_prod(steps, torch.arange(height), torch.arange(width)).T

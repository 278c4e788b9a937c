"""The role that scores responses, by a function or by a model."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoTokenizer

from dataproto import DataProto
from dataproto.columns import COLUMNS, SCORED_NUMBERS, require, taken_names
from dataproto.errors import RewardError, ScoreCountMismatch
from workers.ranks.dispatch_modes import dispatch
from workers.ranks.mesh import Ranks
from workers.roles.critic import CriticConfig, ValueWorker


@dataclass(frozen=True)
class RewardRow:
    """What a reward function gets of a row."""

    solution_str: str  # the response, without special tokens
    ground_truth: Any
    data_source: str = ""
    extra_info: Mapping[str, Any] | None = None
    prompt: Any = None  # messages
    response_length: int | None = None  # tokens that were sampled
    uid: str = ""  # of the prompt, for messages
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the data set by their own names, pictures loaded


# One {"score": float, ...} for each row; further numbers become columns.
RewardFunction = Callable[[Sequence[RewardRow]], Sequence[Mapping[str, float]]]


def check_ready(reward: Callable[..., Any]) -> None:
    """Calls the method ``check`` of a reward function that has one: it raises if the function cannot score, as when its server
    cannot be reached.
    """
    if callable(check := getattr(reward, "check", None)):
        check()


def uses_device(reward: Callable[..., Any]) -> bool:
    """Whether a reward function says, by its attribute ``uses_device``, that it computes on a device that models may use too."""
    return bool(getattr(reward, "uses_device", False))


class RewardWorker:
    """Decodes responses and scores them with a function."""

    def __init__(self, score_rows: RewardFunction, model_path: str, ranks: Ranks | None = None) -> None:
        """``model_path`` is the directory of the responses' tokenizer; ``ranks`` score together, as those of a model do.

        Raises:
            RewardError: ``score_rows`` takes something else than one list of rows, as functions of verl's and TRL's forms do.
        """
        try:
            inspect.signature(score_rows).bind([])
        except TypeError as error:
            raise RewardError(f"reward {score_rows}: {error}; see recipes.rewards.as_reward_function") from error
        check_ready(score_rows)
        self.score_rows = score_rows
        self.ranks = ranks or Ranks()
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)

    @dispatch("dp")
    def score(self, data: DataProto) -> DataProto:
        """``token_level_rewards`` ``(B, R)`` with each score on the last response token, and a column for each number.

        Columns ``(B,)``: ``score``, other numbers that the function returned (``acc``, ``format``), and ``response_text``. A row
        without a number, or with one that is not finite, has ``None``.

        Raises:
            MissingColumn: a required column is absent.
            RewardError: the function did not return one score for each row that is finite as a float32, or an ``acc`` is not
                finite, and names the row; or it returned a number under a name that is taken, see
                `dataproto.columns.taken_names`.
        """
        with self.ranks.fail_together():
            require(data, "responses", "response_mask")
            texts = self.decode(data)
        returned: Any = self.results(data, texts)
        if not isinstance(returned, Iterable):
            raise ScoreCountMismatch(f"the reward function returned {returned!r}, not a list of {len(data)} results")
        results = list(returned)
        check_results(results, len(data))
        check_names(results, data)
        scores = torch.tensor([float(result["score"]) for result in results], dtype=torch.float32)
        names = sorted({name for result in results for name in result})
        numbers = {name: np.array([finite_number(result, name) for result in results], dtype=object) for name in names}
        return DataProto.from_dict(
            {"token_level_rewards": place_on_last_token(scores, data["response_mask"])},
            non_tensors=numbers | {"response_text": np.array(texts, dtype=object)},
        )

    def results(self, data: DataProto, texts: Sequence[str]) -> Sequence[Mapping[str, float]]:
        """One ``{"score": float, ...}`` for each row."""
        return self.score_rows(reward_rows(data, texts))

    def decode(self, data: DataProto) -> list[str]:
        mask = data["response_mask"].bool()
        ids = [row[kept].tolist() for row, kept in zip(data["responses"], mask, strict=True)]
        return list(self.tokenizer.batch_decode(ids, skip_special_tokens=True)) if ids else []


@dataclass(frozen=True)
class ModelReward:
    """A reward model: a critic, and the directory into which `CriticWorker.save` wrote its weights.

    Without a directory its value head is zero, and so is every score.
    """

    critic: CriticConfig
    directory: Path | None = None


class ModelRewardWorker(RewardWorker):
    """Scores each response with the value at its last token, usually the end token."""

    def __init__(
        self, config: ModelReward, model_path: str, device: torch.device | None = None, ranks: Ranks | None = None
    ) -> None:
        """``model_path`` is the directory of the responses' tokenizer."""
        super().__init__(lambda rows: [], model_path, ranks)
        self.critic = ValueWorker(config.critic, device, ranks)
        if config.directory is not None:
            self.critic.model.load(config.directory)

    def results(self, data: DataProto, texts: Sequence[str]) -> Sequence[Mapping[str, float]]:
        """The values; 0 for a row without a response."""
        values = self.critic.values(data)["values"]
        last = last_tokens(data["response_mask"])
        scores = values.gather(1, last.clamp(min=0)[:, None])[:, 0].where(last >= 0, 0.0)
        return [{"score": score} for score in scores.tolist()]


def last_tokens(response_mask: Tensor) -> Tensor:
    """``(B,)`` int64: the place of each row's last response token, -1 for a row without one."""
    numbers = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    return pad(torch.where(response_mask != 0, numbers, 0), (1, 0)).amax(1) - 1


def place_on_last_token(scores: Tensor, response_mask: Tensor) -> Tensor:
    """``(B,)`` to ``(B, R)``: each score on its row's last response token; a row without one gets no score.

    >>> place_on_last_token(torch.tensor([1.0, 2.0]), torch.tensor([[1, 1, 0], [0, 0, 0]])).tolist()
    [[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    return torch.where(columns == last_tokens(response_mask)[:, None], scores[:, None], 0.0)


def reward_rows(data: DataProto, texts: Sequence[str]) -> list[RewardRow]:
    """What a reward function gets of the rows; columns may be absent."""
    given: dict[str, Any] = {"reward_model": {}, "data_source": "", "extra_info": None, "raw_prompt": None, "uid": ""}
    found = [data[name] if name in data else [absent] * len(data) for name, absent in given.items()]
    lengths = data["response_mask"].bool().sum(1).tolist() if "response_mask" in data else [None] * len(data)
    return [
        RewardRow(text, dict(model or {}).get("ground_truth"), source, extra, prompt, length, str(uid), own)
        for text, model, source, extra, prompt, uid, length, own in zip(
            texts, *found, lengths, own_columns(data), strict=True
        )
    ]


def own_columns(data: DataProto) -> list[dict[str, Any]]:
    """The columns of the data set for each row, by their own names, with the media as they were loaded."""
    nothing: list[dict[str, Any]] = [{}] * len(data)
    values, kinds, media = (
        data[name] if name in data else nothing for name in ("own_columns", "media_columns", "multi_modal_data")
    )
    return [
        dict(own or {}) | {name: loaded_media(kind, found or {}) for name, kind in (named or {}).items()}
        for own, named, found in zip(values, kinds, media, strict=True)
    ]


def loaded_media(kind: str, media: Mapping[str, Sequence[Any]]) -> Any:
    """The media of a column: all of them of the kinds ``images``, ``videos`` and ``audios``, the only one of ``image``, ``video``
    and ``audio``.

    >>> loaded_media("images", {"image": ["a", "b"]}), loaded_media("image", {"image": ["a"]}), loaded_media("video", {})
    (['a', 'b'], 'a', None)
    """
    found = list(media.get(kind.removesuffix("s"), ()))
    return found if kind.endswith("s") else next(iter(found), None)


def check_results(results: Sequence[Any], rows: int) -> None:
    if len(results) != rows:
        raise ScoreCountMismatch(f"the reward function returned {len(results)} results for {rows} rows")
    for row, result in enumerate(results):
        if not isinstance(result, Mapping) or finite_number(result, "score") is None:
            raise RewardError(
                f"row {row}: the reward function returned {result!r}, not a mapping with a 'score' that is finite as a float32"
            )
        if result.get("acc") is not None and finite_number(result, "acc") is None:
            raise RewardError(
                f"row {row}: the reward function returned {result!r}, whose 'acc' is not a finite number: leave it out of rows "
                "that it did not judge"
            )


def finite_number(result: Mapping[str, Any], name: str) -> Any:
    """A number of a result, or `None` if it has none of this name that is finite as a float32.

    >>> finite_number({"score": 0.5}, "score"), finite_number({"score": 1e39}, "score"), finite_number({}, "acc")
    (0.5, None, None)
    """
    value: Any = result.get(name)
    number: Any = value if isinstance(value, (int, float, np.number)) else math.nan
    return value if abs(number) <= torch.finfo(torch.float32).max else None


def check_names(results: Sequence[Mapping[str, float]], data: DataProto) -> None:
    """Numbers become columns, which must not take the place of those of the library. Raises `RewardError`."""
    present = [name for name in data.names() if name in COLUMNS and name not in SCORED_NUMBERS]
    if taken := taken_names({name for result in results for name in result}, present):
        raise RewardError(
            f"the reward function returned numbers named {', '.join(taken)}; the batch has columns of that name, or the library "
            "would take them for its own (docs/columns.md): give the numbers other names"
        )

"""Scores of reward models: of Hugging Face sequence classifiers, and of what ``dataproto reward-model`` has trained."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dataproto import DataProto
from dataproto.columns import PAIR
from dataproto.errors import DataProtoError, RewardError, raised_as
from rollout.answers import AnsweredPrompt, AnswersBuilder
from rollout.prompts.messages import MARKERS
from workers.roles.critic import HEAD_FILE, CriticConfig, ValueWorker, load_head
from workers.roles.reward import RewardRow

LONGEST = 2**20
"""Tokens of a conversation that a ranking model reads; the prompts of a run have their own limit."""


@dataclass
class SequenceClassifier:
    """A reward function: what a model of ``AutoModelForSequenceClassification`` says about a prompt and its response.

    The score is the model's logit if it has one label, else the probability of ``label``. The text is that of the model's own
    chat template, or without one the pair of prompt and response. Images are not shown to it.

    A checkpoint of ``dataproto reward-model`` gives the score of the conversation with its images instead; see `RankedAnswers`.

    The model is loaded at the first call, in the process that scores.
    """

    model_path: str  # directory or hub name
    label: int = 0  # of a model with several labels
    batch_size: int = 16  # texts in one forward pass
    device: str | None = None  # default: the GPU if there is one
    _loaded: Any = field(default=None, init=False, repr=False, compare=False)

    def __call__(self, rows: Sequence[RewardRow]) -> list[dict[str, float]]:
        """``score`` of each row.

        Raises:
            RewardError: the model cannot be loaded or has no such label; a text is longer than the model takes (names the row);
                a score is not finite (names the row).
        """
        if (Path(self.model_path) / HEAD_FILE).exists():  # a reward model of ours
            self._loaded = self._loaded or RankedAnswers(self.model_path, self.device)
            scores = self._loaded(rows)
        else:
            scores = self._classified(rows)
        for number, score in enumerate(scores):
            if not math.isfinite(score):
                raise RewardError(f"row {number}: {self.model_path} gives the score {score}")
        return [{"score": score} for score in scores]

    def _classified(self, rows: Sequence[RewardRow]) -> list[float]:
        """The scores of a sequence classifier."""
        tokenizer, model = self._load()
        texts = [self._encode(tokenizer, row) for row in rows]
        most = getattr(model.config, "max_position_embeddings", None)
        for number, text in enumerate(texts):
            if most and len(text["input_ids"]) > most:
                raise RewardError(
                    f"row {number}: {len(text['input_ids'])} tokens of prompt and response, but {self.model_path} takes "
                    f"{most}: lower --max-prompt-length or --max-response-length, or choose another model"
                )
        scores: list[float] = []
        for start in range(0, len(texts), self.batch_size):
            scores += self._scores(tokenizer, model, texts[start : start + self.batch_size])
        return scores

    def check(self) -> None:
        """Raises `RewardError` before any weights are loaded if the checkpoint is no classifier and no reward model."""
        if (Path(self.model_path) / HEAD_FILE).exists():
            return
        from transformers import AutoConfig

        with self._read_by_transformers():
            made_for = AutoConfig.from_pretrained(self.model_path).architectures or []
        if made_for and not any("SequenceClassification" in name for name in made_for):
            raise RewardError(
                f"{self.model_path} is not a sequence classifier but a {made_for[0]}, which has no score: train a reward model "
                "from it by `dataproto reward-model`"
            )

    @contextmanager
    def _read_by_transformers(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise RewardError(
                f"{self.model_path!r} is not a sequence classifier: {reason} (that of a run of `dataproto reward-model` is "
                "RUN/global_step_N/actor/huggingface)"
            ) from error

    @property
    def uses_device(self) -> bool:
        """Whether it may share a GPU with models, which then wait for its scores."""
        return self.device != "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}  # another process loads its own

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer

            device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
            model: Any
            with self._read_by_transformers():
                tokenizer: Any = AutoTokenizer.from_pretrained(self.model_path)
                model, found = AutoModelForSequenceClassification.from_pretrained(
                    self.model_path, dtype="auto", output_loading_info=True
                )
            if absent := sorted(found["missing_keys"]):
                raise RewardError(
                    f"{self.model_path} is not a sequence classifier: it lacks {', '.join(absent)}, which would be random"
                )
            labels = model.config.num_labels
            if not 0 <= self.label < labels:
                raise RewardError(f"{self.model_path} has {labels} labels, so label={self.label} does not exist")
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token
            model.config.pad_token_id = tokenizer.pad_token_id  # by which decoders find the last token
            self._loaded = tokenizer, model.to(device).eval()
        return self._loaded

    def _encode(self, tokenizer: Any, row: RewardRow) -> dict[str, list[int]]:
        texts = text_turns(row.prompt)
        if tokenizer.chat_template:
            turns = [*texts, {"role": "assistant", "content": row.solution_str}]
            rendered = tokenizer.apply_chat_template(turns, tokenize=False)
            return dict(tokenizer(rendered, add_special_tokens=False))
        return dict(tokenizer("\n".join(each["content"] for each in texts), row.solution_str))

    def _scores(self, tokenizer: Any, model: Any, texts: Sequence[dict[str, list[int]]]) -> list[float]:
        inputs = tokenizer.pad(list(texts), return_tensors="pt").to(model.device)
        with torch.inference_mode():
            logits = model(**inputs).logits.float()  # (rows, labels)
        scores = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, self.label]
        return [float(score) for score in scores]


class RankedAnswers:
    """What ``dataproto reward-model`` has trained: scores of whole conversations, with their images.

    The score is the product of the value head and the state at the answer's end, as in training.
    """

    def __init__(self, checkpoint: str, device: str | None = None) -> None:
        """Loads a checkpoint of ``dataproto reward-model``. Raises `RewardError`."""
        self.checkpoint = checkpoint
        with raised_as(RewardError, f"{checkpoint} is not a reward model", DataProtoError):
            self.builder = AnswersBuilder.from_pretrained(checkpoint, LONGEST).grouped("scored")
            self.worker = ValueWorker(CriticConfig(checkpoint), None if device is None else torch.device(device))
            load_head(self.worker, Path(checkpoint))

    def __call__(self, rows: Sequence[RewardRow]) -> list[float]:
        """Raises `RewardError` for a row without a prompt, or one that the model cannot read; names it."""
        return self.worker.values(self.batch(rows))["values"].sum(1).tolist()

    def batch(self, rows: Sequence[RewardRow]) -> DataProto:
        """The rows as the model reads them. Rows of one prompt that are next to each other share it, so it is computed once."""
        data = self.builder.collate([self._prepare(number, row) for number, row in enumerate(rows)])
        data.pop([PAIR])  # which would hold the rows of a prompt in one micro-batch
        return data

    def _prepare(self, number: int, row: RewardRow) -> AnsweredPrompt:
        asked: Any = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        said = row.solution_str or " "
        answer = {"role": "assistant", "content": [{"type": "text", "text": said}] if MARKERS.search(said) else said}
        with raised_as(RewardError, f"row {number}: {self.checkpoint} cannot score it", DataProtoError):
            if not asked:
                raise RewardError("it has no prompt")
            return self.builder.prepare({"prompt": asked, "answers": [[answer]]})


def text_turns(prompt: Any) -> list[dict[str, str]]:
    """The turns of a `RewardRow.prompt` with their text alone.

    >>> text_turns([{"role": "user", "content": [{"type": "image", "image": ...}, {"type": "text", "text": "Find x."}]}])
    [{'role': 'user', 'content': 'Find x.'}]
    """
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [{"role": turn["role"], "content": _text(turn["content"])} for turn in (() if turns is None else turns)]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")

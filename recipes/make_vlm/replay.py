"""Replayed text: the text model's own answers, which keep its words while it learns to see."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

from dataproto.errors import CheckpointError, writing
from recipes.make_vlm.captions import one_turn
from rollout.engine import SamplingParams, create_engine
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.responses import build_requests
from workers.roles.model_worker import PolicyConfig, ReferenceWorker

ASKED = 400  # questions
EVERY = 10  # of the answers, one is held out
LONGEST = 96  # tokens of an answer; one that has not ended by then is left out
LENGTH = 256  # tokens of question and answer
QUESTIONS = (
    "In one sentence, what is {}?",
    "Write one sentence about {}.",
    "Explain {} to a child in two sentences.",
    "Where do you find {}?",
    "Write a short poem of two lines about {}.",
    "Name three things that go with {}.",
    "How would you describe {} to someone who has never seen it?",
    "Tell me one surprising fact about {}.",
)


@dataclass(frozen=True)
class Replay:
    """Questions with the answers that the text model gave before any training.

    Attributes:
        answers: pairs of question and answer; one of `EVERY` is not learnt.
        loss: of the held-out answers before any training, in nats for each token.
    """

    answers: tuple[tuple[str, str], ...]
    loss: float

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The answers to learn, as conversations without a picture."""
        return conversations([answer for place, answer in enumerate(self.answers) if place % EVERY])

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """The other answers."""
        return conversations(self.answers[::EVERY])

    @classmethod
    def of(cls, checkpoint: Path, things: Sequence[str], seed: int, file: Path) -> Self:
        """What ``file`` holds, or else what the checkpoint says about the things, which is written there."""
        if file.is_file():
            try:
                kept = json.loads(file.read_text(encoding="utf-8"))
                return cls(
                    tuple((str(question), str(answer)) for question, answer in kept["answers"]), float(kept["loss"])
                )
            except (ValueError, LookupError, TypeError) as error:
                raise CheckpointError(f"{file} is damaged: delete it, and the text model is asked again") from error
        answers = own_answers(checkpoint, questions_about(things, seed, ASKED), seed)
        replay = cls(answers, text_loss(checkpoint, conversations(answers[::EVERY])))
        draft = file.with_name(f".{file.name}.partial")
        with writing(file, draft):
            file.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(asdict(replay), indent=1), encoding="utf-8")
            os.replace(draft, file)
        return replay


def questions_about(things: Sequence[str], seed: int, count: int) -> list[str]:
    """Random questions.

    >>> questions_about(["a hat"], seed=0, count=1)
    ['How would you describe a hat to someone who has never seen it?']
    """
    random = Random(f"replay/{seed}")
    return [random.choice(QUESTIONS).format(random.choice(things)) for _ in range(count)]


def own_answers(checkpoint: Path, questions: Sequence[str], seed: int) -> tuple[tuple[str, str], ...]:
    """The questions with an answer sampled at temperature 1, without those whose answer does not end.

    Answers of the policy itself have, in the mean, no gradient at the start: they hold the model where it is.
    """
    builder = PromptBuilder.from_pretrained(checkpoint, max_prompt_length=LENGTH - LONGEST)
    prompts = builder([{"prompt": question} for question in questions])
    sampling = SamplingParams(max_tokens=LONGEST, seed=seed)
    requests = build_requests(prompts, sampling)
    done = {
        one.request: one.token_ids
        for one in create_engine("hf", str(checkpoint)).generate(requests, sampling)
        if one.finish_reason == "stop" and len(one.token_ids) > 1
    }
    decode = partial(builder.tokenizer.decode, skip_special_tokens=True)  # which a conversation may not contain as text
    texts = {place: decode(ids[:-1]).strip() for place, ids in done.items()}
    return tuple((questions[place], texts[place]) for place in sorted(texts) if texts[place])


def conversations(answers: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows for `rollout.prompts.SupervisedBuilder`."""
    return [one_turn(*each, source="replayed text", place=place) for place, each in enumerate(answers)]


def text_loss(checkpoint: Path, rows: Sequence[Mapping[str, Any]]) -> float:
    """The mean loss of the answers' tokens in nats."""
    data = SupervisedBuilder.from_pretrained(checkpoint, LENGTH)(rows)
    data.pop(non_tensor_batch_keys=["multi_modal_data"])
    log_probs = ReferenceWorker(PolicyConfig(str(checkpoint))).log_probs(data)["ref_log_prob"]
    return -float(log_probs[data["response_mask"].bool()].double().mean())

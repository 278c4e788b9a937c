"""Batches of prompts with given answers: rows as of a rollout, in which the answers of a prompt share it.

Letters: B rows, R tokens of the longest answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch

from dataproto import DataProto, object_array
from dataproto.columns import PAIR
from dataproto.errors import InvalidPrompt
from rollout.engine import Completion, SamplingParams
from rollout.prompts import PromptBuilder, SupervisedBuilder
from rollout.prompts.messages import Conversation, Turns
from rollout.prompts.prepared_rows import Prompt, by_kind, conversation_of
from rollout.responses import attach_responses

Grouping = Literal["pairs", "answers", "scored"]
"""Pairs of answers; answers without a partner, each with that to another prompt; or pairs whose last state is scored."""
ANSWER_KEY = "answer_key"


@dataclass(frozen=True)
class AnsweredPrompt(Prompt):
    """A prompt with its answers, each up to its end token."""

    answers: tuple[list[int], ...]

    def key(self, answer: Sequence[int]) -> str:
        """A digest of the prompt, its media and an answer: 32 hexadecimal digits, equal in all processes."""
        media = [medium.key for medium in by_kind(self.media)]
        return blake2b(repr((self.input_ids.tobytes(), media, answer)).encode(), digest_size=16).hexdigest()


class AnswersBuilder(SupervisedBuilder):
    """Rows with ``prompt``, ``answers`` (each a list of one message) and ``labels`` to batches of their answers.

    The rows of a prompt are next to each other and have equal prompts, which a model then computes once. ``response_mask`` is 1
    on the tokens of the answers. ``max_prompt_length`` limits prompt and answer together.
    """

    turns: Turns = "last"
    grouping: Grouping = "pairs"

    def grouped(self, grouping: Grouping) -> "AnswersBuilder":
        """This builder, with another grouping."""
        self.grouping = grouping
        return self

    _pieces = PromptBuilder._pieces  # those of the prompt

    def check_content(self, conversation: Conversation) -> None:
        """As of all prompts; but an answer that is scored may say whatever a policy has sampled. It is text, also where it spells
        a token that stands for media.
        """
        given = conversation.messages[:-1] if self._is_scored(conversation) else conversation.messages
        super().check_content(replace(conversation, messages=given))

    def check_placeholders(self, ids: Sequence[int], conversation: Conversation) -> None:
        """As of all prompts; `prepare` checks the prompt of an answer that is scored by itself."""
        if not self._is_scored(conversation):
            super().check_placeholders(ids, conversation)

    def _is_scored(self, conversation: Conversation) -> bool:
        """Whether the conversation ends with an answer that is scored."""
        return self.grouping == "scored" and conversation.messages[-1]["role"] == "assistant"

    def prompt_length(self, row: Mapping[str, Any]) -> int:
        """Number of tokens of the prompt and the longest answer; see `PromptBuilder.prompt_length`."""
        return super().prompt_length(row) + max(map(len, self._answers(row)))

    def prepare(self, row: Mapping[str, Any]) -> AnsweredPrompt:  # type: ignore[override]
        """Prepares one prompt and its answers: images are decoded and processed once. Raises `InvalidPrompt`."""
        answers = self._answers(row)
        prompt = PromptBuilder.prepare(self, {name: value for name, value in row.items() if name != "answers"})
        self.check_length(len(prompt.input_ids) + max(map(len, answers)))
        return AnsweredPrompt(**vars(prompt), answers=tuple(answers))

    def _answers(self, row: Mapping[str, Any]) -> list[list[int]]:
        """The tokens of each answer."""
        if self.grouping != "answers" and len(row.get("labels", ())) == 1:
            raise InvalidPrompt(
                "the row has one answer with a label, not a chosen and a rejected one: `dataproto dpo` takes it by loss kto"
            )
        found, before = [], None
        for answer in row["answers"]:
            if len(answer) != 1 or answer[0].get("role") != "assistant":
                raise InvalidPrompt("an answer must be one message of the assistant: put earlier ones into the prompt")
            conversation = conversation_of({**row, "prompt": [*row["prompt"], *answer]})
            (prompt, _), (tokens, _), *_ = SupervisedBuilder._pieces(self, self.shown(conversation))
            if before not in (None, prompt):
                raise InvalidPrompt("the chat template writes the prompt differently before different answers")
            before = prompt
            found.append(tokens)
        if found[1:] == found[:1]:
            raise InvalidPrompt("both answers are the same: neither is preferred")
        return found

    def collate(self, prompts: Sequence[Prompt]) -> DataProto:
        """The rows of all answers. Those of a pair have the same `PAIR`; others have ``desirable (B,)`` and ``mismatched (B,)``,
        which marks answers to a prompt before.
        """
        places, answers, columns = self._rows(prompts)
        batch = PromptBuilder.collate(self, prompts)
        keys = [prompts[place].key(answer) for place, answer in zip(places, answers, strict=True)]  # type: ignore[attr-defined]
        if self.grouping == "scored":
            answers = [[*answer, answer[-1]] for answer in answers]  # the state of the end predicts the last token
        completions = [Completion(row, answer, [0.0] * len(answer), "stop") for row, answer in enumerate(answers)]
        sampling = SamplingParams(max_tokens=max(map(len, answers)))
        data = attach_responses(batch[np.array(places)], completions, sampling, self.family, self.pad_token_id)
        data.pop(["rollout_log_probs", "truncated"])
        if self.grouping == "scored":
            lengths = data["response_mask"].sum(1, keepdim=True)
            data["response_mask"] = (torch.arange(data["response_mask"].shape[1]) == lengths - 1).to(torch.int64)
        for name, values in columns.items():
            data[name] = torch.tensor(values)
        data[ANSWER_KEY] = object_array(keys)
        return data

    def _rows(self, prompts: Sequence[Any]) -> tuple[list[int], list[list[int]], dict[str, list[int]]]:
        """For each row its prompt's place and its answer, and the further columns."""
        each = [(place, answer) for place, prompt in enumerate(prompts) for answer in prompt.answers]
        if self.grouping != "answers":
            return [place for place, _ in each], [answer for _, answer in each], {PAIR: [place for place, _ in each]}
        labels = [label for prompt in prompts for label in prompt.columns["labels"]]
        if len(prompts) == 1:  # there is no other prompt
            own = [answer for _, answer in each]
            return [0] * len(own), own, {"desirable": [int(label) for label in labels], "mismatched": [0] * len(own)}
        most = max(len(prompt.answers) for prompt in prompts)
        others = [answer for _, answer in [*each[-most:], *each[:-most]]]  # as TRL's, to another prompt
        return (
            [place for place, _ in each for _ in range(2)],
            [answer for (_, own), other in zip(each, others, strict=True) for answer in (own, other)],
            {
                "desirable": [int(label) for label in labels for _ in range(2)],
                "mismatched": [number for _ in each for number in range(2)],
            },
        )

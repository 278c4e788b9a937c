"""Conversations to training rows: chat template, tokens, images, and the mask of the assistant's turns.

A conversation is rendered in pieces that are encoded separately: the text before an assistant's turn, the turn, and so on. So the
tokens of a prompt are those that the model gets in a rollout, and the tokens of a turn are those that it would sample.

Letters: B rows, L tokens of the longest row, R = L - 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from dataproto import DataProto, object_array
from dataproto.collation import Rows, collate_supervised
from dataproto.errors import InvalidConfig, InvalidPrompt, InvalidRow
from dataproto.vlm import media_grids
from rollout.prompts.image_processing import ProcessedMedium
from rollout.prompts.messages import REASONING, THOUGHTS, Conversation, Messages, Turns, is_learned, says_something
from rollout.prompts.prepared_rows import Prompt, conversation_of, row_columns, share_media
from rollout.prompts.prompt_builder import ANSWER, QUESTION, Piece, PromptBuilder, ids_of

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TrainingRow(Prompt):
    """A conversation that is prepared for `collate_rows`."""

    loss_mask: npt.NDArray[np.uint8]  # (P,) 1 on tokens that are learned


class SupervisedBuilder(PromptBuilder):
    """Rows to a training batch. As `PromptBuilder`, but a row's ``prompt`` is a conversation with its answers.

    The learned tokens are the assistant's turns, all or only the last, up to and including the token at which the model stops:
    the last of ``end_ids`` in the turn, or else the one with which the next message begins. ``max_prompt_length`` limits the
    whole conversation.
    """

    counted = "row"
    turns: Turns = "all"

    def learning(self, turns: Turns) -> "SupervisedBuilder":
        """This builder, set to learn ``"all"`` turns or only the ``"last"``. Raises `InvalidConfig`."""
        if turns not in get_args(Turns):
            raise InvalidConfig(f"turns={turns!r}: choose one of {', '.join(get_args(Turns))}")
        self.turns = turns
        return self

    def prepare(self, row: Mapping[str, Any]) -> TrainingRow:
        """Prepares one conversation: images are decoded and processed. Raises `InvalidPrompt`; for a conversation that is too
        long, before images are decoded.
        """
        conversation, pieces, media = self._read(row)
        ids, types, mask = self._expand(pieces, self.placed(media))
        self.check_length(len(ids))
        return TrainingRow(ids, types, ids_of(pieces), conversation, media, self.other_columns(row), mask)

    def last_answer(self, row: Mapping[str, Any]) -> str:
        """The text of the row's last message as it is learned, calls included, without special tokens. Raises `InvalidPrompt`."""
        learned = [piece for piece, learns in self._pieces(self.shown(conversation_of(row))) if learns]
        return str(self.tokenizer.decode(learned[-1], skip_special_tokens=True)).strip()

    def collate(self, prompts: Sequence[Prompt]) -> DataProto:
        """The training batch, see `collate_rows`. Raises `InvalidRow` for a row that is not a `TrainingRow`."""
        rows = []
        for place, row in enumerate(prompts):
            if not isinstance(row, TrainingRow):
                raise InvalidRow(
                    place, f"it is a {type(row).__name__}, not a TrainingRow: make it by SupervisedBuilder.prepare"
                )
            rows.append(row)
        return collate_rows(self, rows, [row.loss_mask for row in rows], row_columns(rows) | {"uid": self.uids(rows)})

    def _pieces(self, conversation: Conversation) -> list[Piece]:
        """The tokens of the whole conversation."""
        self.check_content(conversation)
        messages, tools = conversation.messages, conversation.tools
        speaking = [place for place, message in enumerate(messages) if is_learned(message)]
        if not speaking or not speaking[0]:
            raise InvalidPrompt(
                "a conversation must begin with a prompt and contain an answer of the assistant to learn"
            )
        pieces: list[Piece] = []
        done, begun = "", list[int]()  # the end of the last answer, if what follows begins with it
        for place in speaking if self.turns == "all" else speaking[-1:]:
            if not says_something(messages[place]):
                raise InvalidPrompt(f"the answer in message {place} is empty: only its end would be learned")
            before = self.render(messages[:place], add_generation_prompt=True, tools=tools)
            whole = self.render(messages[: place + 1], tools=tools)
            self._check_thoughts(conversation, place, before, whole)
            if not (before.startswith(done) and whole.startswith(before)):
                raise InvalidPrompt(
                    f"the chat template renders the turns before message {place} differently if that message follows, so "
                    "its tokens cannot be identified: learn the last turn only, or split the conversation into one row per turn"
                )
            prompt, answer = self.encode_text(before[len(done) :]), self.encode_text(whole[len(before) :])
            pieces.append((prompt[len(begun) :], False))
            ends = [at for at, token in enumerate(answer) if token in self.end_ids]
            begun = [] if ends else self._end_after(messages, place, whole[len(before) :])
            end = ends[-1] + 1 if ends else len(answer)
            pieces += [(answer[:end] + begun, True), (answer[end:], False)]
            done = whole
        pieces.pop()  # the tokens after the last turn are not needed
        if Conversation(messages[place + 1 :], []).kinds():
            raise InvalidPrompt(
                f"media follow the last answer that is learned, message {place}: leave out what follows it"
            )
        self.check_placeholders(ids_of(pieces), conversation)
        return pieces

    def _check_thoughts(self, conversation: Conversation, place: int, before: str, whole: str) -> None:
        """Raises `InvalidPrompt` if the turn of message ``place`` would not have exactly the thoughts of that message: the
        template does not write them, writes thoughts of its own too, or ends them in the prompt ``before`` the answer.
        """
        begin, end = THOUGHTS
        for name in REASONING:
            told = conversation.messages[place].get(name)
            if isinstance(told, str) and told.strip() not in whole:
                raise InvalidPrompt(
                    f"the chat template does not write {name!r} of message {place}, so it would not be learned: write it into "
                    f"the content, as {begin}...{end}, or leave it out"
                )
        text = "".join(Conversation([conversation.messages[place]], []).texts())
        if begin not in text and end not in text and whole.startswith(before):
            return
        prior = self.render(conversation.messages[:place], tools=conversation.tools)
        for mark in THOUGHTS:
            if mark in text and whole.count(mark) - prior.count(mark) > text.count(mark):
                raise InvalidPrompt(
                    f"the chat template writes {mark} before an answer and reads no reasoning_content, so the answer in message "
                    f"{place} would have thoughts twice: leave out {begin}...{end} there, or use another template"
                )
        of_this_turn = before.startswith(prior) and whole.startswith(prior)
        if of_this_turn and end in before[len(prior) :] and not whole.startswith(before):
            raise InvalidPrompt(
                f"the prompt of the answer in message {place} ends its thoughts ({begin}...{end}) already, and the chat template "
                "writes the answer with others or none: take the thoughts out of the answers, or leave out the template argument "
                "that turns them off (enable_thinking false)"
            )

    def _end_after(self, messages: Messages, place: int, text: str) -> list[int]:
        """The token at which the model stops after ``text``, the answer in message ``place``: the first one that the template
        writes there before the next message. Raises `InvalidPrompt` if that is none of ``end_ids``.
        """
        following = messages[place + 1]["role"] if place + 1 < len(messages) else None
        role = following or ("tool" if messages[place].get("tool_calls") else "user")
        asked, answered = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
        after = self.render([asked, answered, {"role": role, "content": "?"}]).partition(ANSWER)[2]
        first = self.encode_text(after)[:1]
        if not set(first) <= set(self.end_ids) or not first:
            stops = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(list(self.end_ids)))) or "no token"
            raise InvalidPrompt(
                f"the answer in message {place} has no end that can be learned: the chat template ends it with {text[-16:]!r}, "
                f"and the model stops at {stops}: add the token that ends a turn to eos_token_id of the checkpoint's "
                "generation_config.json"
            )
        return first

    def _expand(
        self, pieces: Sequence[Piece], media: Sequence[ProcessedMedium]
    ) -> tuple[Ids, npt.NDArray[np.int8], npt.NDArray[np.uint8]]:
        """Ids, token types and loss mask, all ``(P,)``, with one placeholder per feature."""
        banned = self.family.banned_ids(self.config)
        queues = {kind: iter([each for each in media if each.kind == kind]) for kind in self.placeholders}
        parts, shown = [], 0
        for piece, learned in pieces:
            counts = {kind: 0 if own is None else piece.count(own) for kind, own in self.placeholders.items()}
            own_media = [medium for kind, count in counts.items() for medium in islice(queues[kind], count)]
            expanded, types = self.expand(piece, own_media, shown)
            shown += counts["image"]
            mask = (~np.isin(expanded, banned) & (types == 0) & learned).astype(np.uint8)
            parts.append((expanded, types, mask))
        ids, types, mask = (np.concatenate(column) for column in zip(*parts))
        return ids, types, mask


def collate_rows(
    builder: PromptBuilder, rows: Sequence[Prompt], loss_mask: Rows, objects: Mapping[str, Sequence[Any]]
) -> DataProto:
    """A batch of training rows with the columns of a rollout, right-padded, R = L - 1, with positions and shared media.

    Args:
        loss_mask: for each row ``(P,)`` uint8, 1 on tokens that are learned.
        objects: additional object columns.
    """
    if not rows:
        raise InvalidPrompt("a training batch needs at least one row")
    data = collate_supervised(
        [row.input_ids for row in rows],
        loss_mask,
        [row.token_types.view(np.uint8) for row in rows],
        pad_token_id=builder.pad_token_id,
    )
    media, inputs = share_media(rows)
    data["position_ids"] = builder.family.position_ids(
        data["mm_token_type_ids"], data["attention_mask"], **media_grids(inputs), config=builder.config
    )
    for name, values in {"multi_modal_inputs": inputs, "multi_modal_data": media, **objects}.items():
        data[name] = object_array(list(values))
    return data

"""The conversations of an episode, and the law of tokens: what continues them starts from the ids that were sampled.

An agent keeps its own history and sends it whole. Where a history continues what this episode has seen and said, its ids are
those that the engine was given and sampled, and only what is new is rendered, as what the template adds after an answer. All
other histories begin a new row, for a reason that has a name, see `REASONS`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from dataproto.errors import InvalidPrompt, raised_as
from rollout.agents.messages import LEFT_OUT, TEXT_CLIENTS, Ask, Medium, Message, Refused, Reply, shown
from rollout.continuation import BegunTurn, Tokens, continued_experts
from rollout.engine import Request, SamplingParams
from rollout.environments.episode import EpisodeLimits, EpisodeStart, TurnRequests
from rollout.environments.turn_renderer import RenderedTurn, TurnRenderer
from rollout.prompts.prepared_rows import keys_of_images, media_objects
from rollout.sampling import derive_seed

REASONS = {
    "branch": "it continues, or asks again, what has another reply already; its ids begin with the same ids",
    "samples": "it is a further one of several replies to a request",
    "tools": "the tools are others than before",
    "system": "the system messages are others than before",
    "reply": "a reply of ours came back with other words, calls or arguments",
    "client_text": "a reply of ours came back with text of the client's after it",
    "history": "something before a reply of ours is other than it was, or was left out: compaction",
    "assistant": "it has an answer that is not ours",
    "template": "the chat template cannot show the new messages after an answer",
    "conversation": "it shares nothing with what was said before, such as that of another agent",
}
"""Why a request begins a new row of its episode."""
WITHOUT_PICTURE = (
    "the agent's client wrote {!r} in the place of a tool's picture, so the policy never sees it: send it in a message of the "
    "user, or by a wire or a client that can"
)


@dataclass(eq=False)
class AgentTurn:
    """A request and, once the engine has sampled it, its reply."""

    id: str
    ask: Ask
    parent: "AgentTurn | None"  # whose reply it follows
    new: tuple[Message, ...]  # after that reply, or all messages
    rendered: RenderedTurn
    request: Request
    state: str  # digest of the new messages
    children: list["AgentTurn"] = field(default_factory=list)
    row: "AgentRow" = field(init=False)  # in which it is sampled
    replies: "Future[list[Reply]]" = field(init=False)  # those of the turns of its request,
    together: list["AgentTurn"] = field(init=False)  # which are these
    number: int | None = None  # of the request, as long as the engine keeps it
    sampling: SamplingParams | None = None
    partial: Tokens | None = None  # of a turn that was stopped
    tokens: Tokens | None = None  # that were sampled
    ends: str = ""  # why the engine ended it
    reply: Reply | None = None

    @property
    def sampled(self) -> BegunTurn:
        """What was sampled so far, by the request's seed and prompt, for an episode that continues in another process."""
        tokens, whole = (self.tokens or self.partial or Tokens()), self.tokens is not None
        return BegunTurn(tokens, whole, self.request.input_ids.tolist(), f"{self.request.seed} {self.ends}")


@dataclass(eq=False)
class AgentRow:
    """Turns whose ids only grow, and why it does not continue another row; empty for the first row of an episode."""

    reason: str
    turns: list[AgentTurn] = field(default_factory=list)
    experts: Tensor | None = None


class Prompts(TurnRequests):
    """Renders requests, equal ones once in all episodes. Equal first requests share their tensors: their prompt is read once."""

    def __init__(self, renderer: TurnRenderer, limits: EpisodeLimits) -> None:
        super().__init__(renderer, limits)
        self._whole: dict[Any, tuple[RenderedTurn, Request]] = {}
        self._after: dict[Any, RenderedTurn] = {}

    def whole(self, ask: Ask) -> tuple[RenderedTurn, Request]:
        """All messages as a prompt. Raises `InvalidPrompt`."""
        key = (ask.tools_key, ask.begins, _told(ask.messages))
        if key not in self._whole:
            rendered = self.renderer.messages(shown(ask.messages, ask.tools), begins=ask.begins)
            ids, types = torch.from_numpy(rendered.ids), torch.from_numpy(rendered.token_types)
            data, media = media_objects(rendered.shown), (rendered.media,) if rendered.media else ()
            keys = keys_of_images(rendered.shown)
            request = Request(rendered.raw_ids, ids, types, rendered.position_ids, data, media, image_keys=keys)
            self._whole[key] = rendered, request
        return self._whole[key]

    def after(self, turn: AgentTurn, new: Sequence[Message], begins: str) -> tuple[RenderedTurn, Request]:
        """New messages after the ids of a turn and its reply. Raises `InvalidPrompt`."""
        assert turn.tokens is not None
        sampled = turn.tokens.token_ids
        key = (sampled[-1], begins, _told(new))
        if key not in self._after:
            self._after[key] = self.renderer.messages(shown(new), last=sampled[-1], follows=True, begins=begins)
        rendered = self._after[key]
        return rendered, self.continued(turn.request, sampled, rendered)


class Conversations:
    """The conversations of an episode, as a tree of turns, and the rows that they become."""

    def __init__(self, start: EpisodeStart, prompts: Prompts) -> None:
        self.start, self.prompts = start, prompts
        self.rows: list[AgentRow] = []
        self._first: list[AgentTurn] = []  # that follow no reply of ours
        self._name = blake2b(start.trajectory.encode(), digest_size=4).hexdigest()
        self._opened = 0
        self._asked: Counter[tuple[str, int | None]] = Counter()

    @property
    def turns(self) -> Iterator[AgentTurn]:
        """All turns, those in flight included."""
        return (turn for row in self.rows for turn in row.turns)

    def _check_media(self, ask: Ask) -> None:
        """Raises `Refused` with the field of a medium of a kind that the model does not take."""
        for part in (part for message in ask.messages for part in message.content if isinstance(part, Medium)):
            with raised_as(partial(Refused, field=part.place), part.place, InvalidPrompt):
                self.prompts.renderer.builder.check_taken(part.kind)

    def open(self, ask: Ask, replies: "Future[list[Reply]]") -> list[AgentTurn]:
        """The turns of a request, one for each sample, each at the end of its row. ``replies`` gets those of all of them.

        Raises:
            Refused: the messages cannot be a prompt.
        """
        self._check_media(ask)
        parent, covered = self._follow(ask)
        reason = self._departure(ask, parent, covered)
        try:
            if reason or parent is None:
                parent, new = None, ask.messages
                rendered, request = self.prompts.whole(ask)
            else:
                new = ask.messages[covered:]
                try:
                    rendered, request = self.prompts.after(parent, new, ask.begins)
                except InvalidPrompt:
                    parent, new, reason = None, ask.messages, "template"
                    rendered, request = self.prompts.whole(ask)
        except InvalidPrompt as error:
            raise Refused(str(error), "messages") from error
        for message in new:
            if message.role != "assistant" and (placeholder := LEFT_OUT.search(message.text)):
                warnings.warn(WITHOUT_PICTURE.format(placeholder[0]), stacklevel=2)
        state = _digest(message.digest for message in new)
        found: list[AgentTurn] = []
        for sample in range(ask.n):
            seeded = replace(request, seed=self._seed(ask), uid=self.start.uid)
            turn = AgentTurn(f"{self._name}_{self._opened:08d}", ask, parent, new, rendered, seeded, state)
            self._opened += 1
            self._place(turn, reason or ("samples" if sample else ""))
            turn.replies, turn.together = replies, found
            found.append(turn)
        return found

    def _place(self, turn: AgentTurn, reason: str) -> None:
        """Adds a turn to the row that it continues, or to a new one."""
        siblings = self._first if turn.parent is None else turn.parent.children
        if turn.parent is not None and not reason and turn.parent.row.turns[-1] is turn.parent:
            turn.row = turn.parent.row
        else:
            turn.row = AgentRow(reason or ("branch" if self.rows else ""))
            self.rows.append(turn.row)
        turn.row.turns.append(turn)
        siblings.append(turn)

    def answered(self, turn: AgentTurn, tokens: Tokens, reply: Reply) -> None:
        """Takes what the engine sampled for a turn."""
        turn.tokens, turn.reply = tokens, reply
        turn.row.experts = continued_experts(turn.row.experts, tokens.experts)

    def drop(self, turn: AgentTurn) -> None:
        """Forgets a turn without a reply."""
        turn.row.turns.remove(turn)
        if not turn.row.turns:
            self.rows.remove(turn.row)
        (self._first if turn.parent is None else turn.parent.children).remove(turn)

    def _seed(self, ask: Ask) -> int:
        """Of a sample's random stream: that of the history, whichever of several requests comes first."""
        history = _digest((*(message.digest for message in ask.messages), (ask.tools_key + ask.begins).encode()))
        number = self._asked[history, ask.seed]
        self._asked[history, ask.seed] += 1
        return derive_seed(self.start.seed, history, number, *(() if ask.seed is None else (ask.seed,)))

    # What a history continues

    def _follow(
        self, ask: Ask, tools: bool = True, skip: Callable[[Message], bool] = lambda message: False
    ) -> tuple[AgentTurn | None, int]:
        """The last turn whose history and reply the request's messages begin with, and how many of them these are.

        Args:
            tools: whether the tools have to be equal.
            skip: messages that do not count.
        """
        messages = [message for message in ask.messages if not skip(message)]
        best: tuple[tuple[int, int, bool], AgentTurn | None] = ((0, 0, False), None)
        waiting = [(turn, 0, 0) for turn in self._first]
        while waiting:
            turn, begin, named = waiting.pop()
            said = [message for message in turn.new if not skip(message)]
            end = begin + len(said)
            if turn.reply is None or end >= len(messages) or (tools and turn.ask.tools_key != ask.tools_key):
                continue
            if messages[begin:end] != said or not turn.reply.is_sent_back_as(messages[end]):
                continue
            named += turn.reply.is_named_by(messages[end])
            best = max(best, ((end + 1, named, not turn.children), turn), key=lambda each: each[0])
            waiting += [(child, end + 1, named) for child in turn.children]
        return best[1], best[0][0]

    def _departure(self, ask: Ask, parent: AgentTurn | None, covered: int) -> str:
        """Why a request cannot go on from the ids of an earlier one, though there are some; empty if it can."""
        if not self.rows or (_answered(ask.messages, covered) and parent is not None):
            return ""
        if (found := self._follow(ask, tools=False))[0] and _answered(ask.messages, found[1]):
            return "tools"
        plain = [message for message in ask.messages if message.role != "system"]
        if (found := self._follow(ask, skip=lambda each: each.role == "system"))[0] and _answered(plain, found[1]):
            return "system"
        if (edited := self._edited(ask, parent, covered)) is not None:
            return edited
        replies = [message for message in ask.messages[covered:] if message.role == "assistant"]
        known = [turn.reply for turn in self.turns if turn.reply is not None]
        if any(reply.is_named_by(said) or reply.is_sent_back_as(said) for said in replies for reply in known):
            return "history"
        if parent is not None:
            return "assistant"
        asked = (turn.new for turn in self._first if turn.ask.tools_key == ask.tools_key)
        return "" if any(ask.messages[: len(new)] == new for new in asked) else "conversation"

    def _edited(self, ask: Ask, parent: AgentTurn | None, covered: int) -> str | None:
        """The reason if a reply of ours came back in its place, but changed."""
        for turn in self._first if parent is None else parent.children:
            end = covered + len(turn.new)
            if turn.reply is None or ask.messages[covered:end] != turn.new or end >= len(ask.messages):
                continue
            said, known = ask.messages[end], (each.reply for each in self.turns if each.reply is not None)
            if said.role == "assistant" and not any(reply.is_sent_back_as(said) for reply in known):
                begun = (said.text.removeprefix(text) for text in turn.reply.said if said.text.startswith(text))
                added = any(rest.lstrip().startswith(TEXT_CLIENTS) for rest in begun)
                return "client_text" if added else "reply"
        return None


def _answered(messages: Sequence[Message], covered: int) -> bool:
    """Whether no further answers follow the first ``covered`` messages."""
    return all(message.role != "assistant" for message in messages[covered:])


def _told(messages: Sequence[Message]) -> tuple[Any, ...]:
    """All of messages that a prompt shows; equal pictures are those of equal pixels."""
    return tuple(
        (each.role, each.content, each.calls, tuple(call.id for call in each.calls), each.thoughts, each.call_id)
        for each in messages
    )


def _digest(parts: Iterable[bytes]) -> str:
    return blake2b(b"".join(parts), digest_size=16).hexdigest()

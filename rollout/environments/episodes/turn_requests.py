"""Requests of an episode: the first turn, and each later one behind what was sampled and shown before."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dataproto.columns import media_parts
from dataproto.errors import InvalidPrompt
from rollout.engine import Request
from rollout.environments.environment import Observation
from rollout.environments.episodes.episode import Episode, EpisodeLimits, EpisodeStart
from rollout.environments.episodes.shown_history import EpisodeRow, last_pictures
from rollout.environments.episodes.turn_renderer import RenderedTurn, TurnRenderer
from rollout.prompts import Prompt
from rollout.prompts.prepared_rows import in_prompt_order, media_objects
from rollout.sampling import turn_seed


class TurnRequests:
    """Makes the requests of episodes that are played together: samples of a prompt share the tensors of their first one."""

    def __init__(self, renderer: TurnRenderer, limits: EpisodeLimits) -> None:
        self.renderer, self.limits = renderer, limits
        self._first: dict[Any, tuple[Prompt, Request]] = {}  # by row and content

    def first_turn(self, start: EpisodeStart, observation: Observation) -> tuple[Prompt, Request]:
        """The prompt of an episode that begins with this observation, and its first request, without a seed."""
        key = (id(start.row), observation.role, *self.renderer.content_key(observation))
        if key not in self._first:
            prompt = self.renderer.prompt(start.row, observation)
            self._first[key] = prompt, self._first_request(prompt, observation)
        return self._first[key]

    def new_row(self, episode: Episode) -> EpisodeRow | None:
        """The row in which the episode goes on if it has to leave out pictures that its present row shows."""
        if self.limits.last_pictures is None or not episode.turns:
            return None
        (first, *others), omitted = last_pictures(episode.observations, self.limits.last_pictures)
        if omitted == episode.rows[-1].omitted:
            return None
        _, request = self.first_turn(episode.start, first)
        for turn, observation in zip(episode.turns, others, strict=True):
            shown = self.renderer.turn(observation, turn.token_ids[-1])
            request = self.continued(request, turn.token_ids, shown)
        request = replace(request, seed=turn_seed(episode.start.seed, len(episode.turns)), uid=episode.start.uid)
        return EpisodeRow(len(episode.turns), request, request, omitted)

    def _first_request(self, prompt: Prompt, observation: Observation) -> Request:
        media = list(in_prompt_order(prompt.conversation, prompt.images, prompt.videos))
        shown = sum(not isinstance(part, str) for part in observation.content)
        # Media of the task and of the observation are apart, so that rows that do not show the latter share the former.
        cut = len(media) if self.limits.last_pictures is None else len(media) - shown
        parts = tuple(self.renderer.media(part) for part in (media[:cut], media[cut:]) if part)
        return Request(
            prompt.raw_ids,
            torch.from_numpy(prompt.input_ids),
            torch.from_numpy(prompt.token_types),
            self.renderer.positions(prompt.token_types, parts),
            multi_modal_data=media_objects(prompt.images, prompt.videos),
            multi_modal_inputs=parts,
        )

    def next_request(self, episode: Episode, shown: RenderedTurn) -> Request:
        """The request of the next turn, behind an observation."""
        assert episode.request is not None
        request = self.continued(episode.request, episode.turns[-1].token_ids, shown)
        return replace(request, seed=turn_seed(episode.start.seed, len(episode.turns)), uid=episode.start.uid)

    def continued(self, earlier: Request, token_ids: Sequence[int], shown: RenderedTurn) -> Request:
        """The request behind an earlier one, what was sampled for it, and an observation."""
        sampled = torch.tensor(token_ids)
        types = torch.zeros_like(sampled, dtype=torch.int8)
        data = dict(earlier.multi_modal_data)
        for kind, objects in media_objects(shown.images).items():
            data[kind] = [*data.get(kind, ()), *objects]
        request = Request(
            [*earlier.prompt_ids, *sampled.tolist(), *shown.raw_ids],
            torch.cat([earlier.input_ids, sampled, torch.from_numpy(shown.ids)]),
            torch.cat([earlier.token_types, types, torch.from_numpy(shown.token_types)]),
            self._positions(earlier.position_ids, len(sampled), shown.position_ids),
            multi_modal_data=data,
            multi_modal_inputs=(*media_parts(earlier.multi_modal_inputs), *([shown.media] if shown.media else [])),
        )
        check_growth(earlier, sampled, request)
        return request

    def _positions(self, earlier: Tensor, sampled: int, shown: Tensor) -> Tensor:
        """Positions of a row that goes on with sampled tokens and an observation, whose own positions begin at 0.

        They continue from the largest position of the row so far.
        """
        mask = torch.ones(1, earlier.shape[-1], dtype=torch.int64)
        following = self.renderer.builder.family.extend_positions(earlier[None], mask, sampled + 1)[0]
        return torch.cat([earlier, following[..., :sampled], following[..., sampled:] + shown], dim=-1)


def check_growth(earlier: Request, sampled: Tensor, later: Request) -> None:
    """The law of turns: the later request's ids begin with those of the earlier one and what was sampled.

    Raises:
        InvalidPrompt: they do not; names the first token that differs.
    """
    expected = torch.cat([earlier.input_ids, sampled])
    found = later.input_ids[: len(expected)]
    if not torch.equal(found, expected):
        both = min(len(found), len(expected))
        wrong = (found[:both] != expected[:both]).nonzero()
        place = int(wrong[0]) if len(wrong) else both
        raise InvalidPrompt(f"the turn's tokens differ from those of the turn before from token {place} on")

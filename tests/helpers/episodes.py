"""Engines and environments for tests of episodes: no model, tokens at random."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
from PIL import Image

from dataproto.errors import InvalidPrompt
from helpers.tiny_prompts import tiny_builder
from rollout.engine import Completion
from rollout.environments import EpisodePlan, Observation, TurnRenderer
from rollout.environments.environment_host import EnvironmentHost


def renderer_of(model_type, **options):
    """A renderer with the family's tiny tokenizer and image processor."""
    builder = tiny_builder(model_type, max_prompt_length=4096, **options)
    return TurnRenderer(builder)


@contextmanager
def hosting(make_environment, seconds, memory_gib=None):
    host = EnvironmentHost(make_environment, seconds, memory_gib)
    try:
        yield host
    finally:
        host.shut()


def play_episodes(engine, renderer, starts, make_environment, sampling, limits, weight_version=0):
    return EpisodePlan(make_environment, limits).play(engine, renderer, starts, sampling, weight_version)


class RandomEngine:
    """A `RequestEngine` whose responses are random tokens by the request's seed; it checks what an engine may rely on."""

    def __init__(self, renderer, answers=None, unended=0.0):
        """``answers``: texts to choose from, in place of any tokens. ``unended``: share of turns without an end token."""
        self.answers, self.unended = answers, unended
        self.builder, self.end = renderer.builder, renderer.builder.tokenizer.eos_token_id
        banned = self.builder.family.banned_ids(self.builder.config)
        self.tokens = np.setdiff1d(np.arange(len(self.builder.tokenizer)), [*banned, self.end])
        self.waiting, self.kept, self.requests, self.polls = {}, {}, [], 0

    def submit(self, request, sampling, keep=False):
        number = len(self.requests)
        self.requests.append(request)
        self.waiting[number] = (request, sampling, keep)
        types = self.builder.family.feature_counts(request.multi_modal_inputs, self.builder.config)
        assert types[0] == int((request.token_types == 1).sum())
        return number

    def fork(self, number, request, sampling, keep=False):
        kept, response = self.kept[number]
        before = [*kept.input_ids.tolist(), *response]
        if request.input_ids.tolist()[: len(before)] != before:
            raise InvalidPrompt("not a continuation")
        assert all(one is other for one, other in zip(kept.multi_modal_inputs, request.multi_modal_inputs))
        assert list(request.prompt_ids[: len(kept.prompt_ids) + len(response)]) == [*kept.prompt_ids, *response]
        return self.submit(request, sampling, keep)

    def abort(self, number):
        self.waiting.pop(number, None), self.kept.pop(number, None)

    @property
    def unfinished(self):
        return len(self.waiting)

    def poll(self):
        self.polls += 1
        return [self._complete(number) for number in list(self.waiting)]

    def _complete(self, number):
        request, sampling, keep = self.waiting.pop(number)
        rng = np.random.default_rng(request.seed)
        if self.answers:
            ids = self.builder.encode_text(self.answers[rng.integers(len(self.answers))])
        else:
            ids = rng.choice(self.tokens, rng.integers(0, sampling.max_tokens)).tolist()
        ended = rng.random() >= self.unended
        ids = [*ids, self.end] if ended or not ids else ids
        if keep:
            self.kept[number] = (request, ids)
        return Completion(number, ids, [-1.0] * len(ids), "stop" if ended or ids[-1] == self.end else "length")


WORDS = ["left", "you see", " ", "\n", "", "a goal & a wall", "<b>", "Ünï", "1 2 3"]
SIDES = [(16, 16), (24, 40), (33, 17)]


def drawn_content(rng):
    """Up to four texts and images."""
    return [
        WORDS[rng.integers(len(WORDS))] if rng.random() < 0.6 else picture(*SIDES[rng.integers(3)], rng.integers(4))
        for _ in range(rng.integers(1, 5))
    ]


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


class DrawnEnvironment:
    """Shows random texts and images, and ends by chance."""

    def reset(self, row, seed):
        self.rng = np.random.default_rng(seed)
        return Observation(drawn_content(self.rng))

    def step(self, action):
        rng = self.rng
        return Observation(drawn_content(rng), reward=float(rng.integers(3)), done=bool(rng.random() < 0.2))


def prompts_of(builder, count):
    """Prompts of one word each, with uids."""
    return builder([{"prompt": f"task {row}", "uid": f"u{row}"} for row in range(count)])


def starts_of(count, messages=()):
    messages = list(messages) or [{"role": "user", "content": "Go."}]
    rows = [SimpleNamespace(row={"raw_prompt": messages}, number=number) for number in range(count)]
    from rollout.environments import EpisodeStart

    return [EpisodeStart(each.row, 2 * each.number + 1, each.number, f"u{each.number}") for each in rows]

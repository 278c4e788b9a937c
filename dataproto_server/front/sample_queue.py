"""Samples that wait or are being sampled: they are kept in memory, and sent again to an engine that starts anew."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from dataproto.chunks import Chunk, ImageChunk
from dataproto.grouping import grouped_by
from dataproto_server.backend import Failure, ModelInfo, SampleRequest, Snapshot
from dataproto_server.codec import UNTOLD_IMAGE_TOKENS, write_sample_result
from dataproto_server.config import ServeConfig
from dataproto_server.engine_link import EngineLink, EngineLost
from dataproto_server.front.fair_share import FairShare
from dataproto_server.front.futures import PROTOBUF, Futures, failed
from dataproto_server.ledger.directories import remove_directory
from dataproto_server.ledger.journal import Outcome
from dataproto_server.ledger.records import Catalogue, Sampler
from dataproto_server.refusals import Refused

SENT_AHEAD = 2  # times the samples that the engine decodes at a time are sent to it; the others wait for their share


@dataclass
class Flight:
    """A request for samples that waits or is being computed."""

    request: SampleRequest
    owner: str
    directory: str | None
    session: str
    size: int  # bytes of the request
    sent: bool = False
    tries: int = 0

    def tokens(self, contexts: Mapping[str, int]) -> int:
        """What the request counts in its client's share: the prompt, and the longest answers for which the context has room."""
        request = self.request
        prompt = sum(map(chunk_tokens, request.chunks))
        context, asked = contexts.get(request.snapshot.base_model, 0), request.sampling.max_tokens
        room = max(context - prompt, 0)
        return prompt + request.num_samples * (room if asked is None else min(asked, room))


def chunk_tokens(chunk: Chunk) -> int:
    """Tokens of a chunk, as far as they are told."""
    if isinstance(chunk, ImageChunk):
        return max(chunk.expected_tokens or 0, 0) or UNTOLD_IMAGE_TOKENS
    return len(chunk.tokens)


class Samples:
    """Sends requests for samples to the engine, and their results to who waits."""

    def __init__(
        self, link: EngineLink, catalogue: Catalogue, futures: Futures, config: ServeConfig, counters: Counter[str]
    ) -> None:
        self.link, self.catalogue, self.futures = link, catalogue, futures
        self.config, self.counters = config, counters
        self.flights: dict[str, Flight] = {}
        self._retired: set[str] = set()
        self._held: Counter[str] = Counter()  # directories that are being read
        self._share: FairShare[str] = FairShare()
        self._due: deque[str] = deque()  # requests that were chosen, and are sent as soon as there is room
        self._sending = asyncio.Lock()
        self._ready = False
        self._contexts: dict[str, int] = {}  # tokens, by base model
        self._tasks: set[asyncio.Task[None]] = set()
        link.on_lost = self._lost

    def take_in(self, request: SampleRequest, sampler: Sampler, size: int) -> None:
        """Takes in a request whose body has a size in bytes. Raises `Refused` with 429 if too many of the key wait."""
        waiting = [each for each in self.flights.values() if each.owner == sampler.owner]
        samples, limits = sum(each.request.num_samples for each in waiting), self.config.limits
        if samples + request.num_samples > limits.max_queued_samples:
            raise Refused(
                429, f"{samples} samples of this key wait: at most {limits.max_queued_samples} (--max-queued-samples)"
            )
        targets = request.target_prompt_logprobs
        size += 0 if targets is None else targets.nbytes
        taken = sum(each.size for each in waiting)
        if taken + size > limits.max_queued_mb << 20:
            raise Refused(429, f"the waiting samples of this key take {taken >> 20} MB (--max-queued-mb)")
        pending = self.futures.open(request.request_id, sampler.owner, sampler.id)
        pending.reason, pending.samples = self._reason, request.num_samples
        self.flights[request.request_id] = Flight(request, sampler.owner, sampler.directory, sampler.session, size)
        self._start(self._send_due())

    def snapshot_of(self, sampler: Sampler) -> Snapshot:
        """What a sampling session samples from."""
        directory = sampler.directory
        return Snapshot(sampler.base_model, None if directory is None else self.catalogue.place(directory))

    def _reason(self) -> str:
        if not self._ready:
            return "the engine starts again; the samples continue then"
        return f"{len(self.flights)} requests for samples are in flight"

    def ready(self, models: Sequence[ModelInfo]) -> None:
        """Sends all requests to an engine that has just started."""
        self._ready = True
        self._contexts = {model.name: model.max_context_length for model in models}
        self._due.clear()
        self._start(self._send_due())

    def _lost(self) -> None:
        self._ready = False
        for each in self.flights.values():
            each.tries += each.sent
            each.sent = False

    def received(self, request: str, result: Any) -> None:
        """Hands a result of the engine to who waits."""
        flight = self.flights.pop(request, None)
        if flight is None:
            return
        if isinstance(result, Failure):
            self.futures.resolve(request, failed(result.message, result.category))
        else:
            self.counters["sampled_tokens_total"] += sum(len(sample.tokens) for sample in result.samples)
            self.futures.resolve(request, Outcome(write_sample_result(result), PROTOBUF))
        self._start(self._send_due())
        self._start(self._remove_unused())

    def cancel(self, request: str) -> None:
        """Drops a request."""
        if self.flights.pop(request, None) is not None:
            self.futures.resolve(request, failed("the client cancelled the request", "user"))
            self._start(self._post("abort", request_ids=[request]))
            self._start(self._send_due())

    def retire(self, directory: str) -> None:
        """Removes the directory of an adapter when no checkpoint, sampling session or request in flight needs it."""
        self._retired.add(directory)
        self._start(self._remove_unused())

    @contextmanager
    def hold(self, directory: str) -> Iterator[None]:
        """Keeps the directory of a checkpoint that is read in the block: retired meanwhile, it is removed then."""
        self._held[directory] += 1
        try:
            yield
        finally:
            self._held -= Counter([directory])
            self._start(self._remove_unused())

    async def _send_due(self) -> None:
        """Sends requests, a fair share of each session, as long as the engine has room."""
        async with self._sending:
            while self._ready and self._has_room() and (request := self._next()) is not None:
                try:
                    await self._send(request, self.flights[request])
                except EngineLost:  # all are sent again when there is a new one
                    if request in self.flights:
                        self.flights[request].sent = False
                    return

    def _has_room(self) -> bool:
        sent = sum(each.request.num_samples for each in self.flights.values() if each.sent)
        return sent < SENT_AHEAD * self.config.engine.max_num_seqs

    def _next(self) -> str | None:
        if not self._due:
            self._due.extend(self._share.choose(self._waiting()))
        while self._due:
            request = self._due.popleft()
            if request in self.flights and not self.flights[request].sent:
                return request
        return None

    def _waiting(self) -> dict[str, Iterator[tuple[str, int]]]:
        """The requests of each session that were not sent, with their tokens."""
        unsent = [request for request, each in self.flights.items() if not each.sent]
        return {
            session: ((request, self.flights[request].tokens(self._contexts)) for request in requests)
            for session, requests in grouped_by(unsent, lambda request: self.flights[request].session).items()
        }

    async def _send(self, request: str, flight: Flight) -> None:
        if flight.tries >= 3:
            self.received(request, Failure("the engine ended 3 times at this request", "server"))
            return
        flight.sent = True
        await self.link.post("submit", request=flight.request)

    async def _remove_unused(self) -> None:
        """Removes retired directories that nothing needs. Requests are sent while files are removed."""
        async with self._sending:
            unused = self._retired - {each.directory for each in self.flights.values()} - self._held.keys()
            self._retired -= unused
            gone = unused - self.catalogue.directories()  # the end of the last sampling session retires others again
            for directory in gone:
                await self._post("forget", directory=self.catalogue.place(directory))
        for directory in gone:
            await asyncio.to_thread(remove_directory, self.catalogue.place(directory))

    async def _post(self, method: str, **arguments: Any) -> None:
        with suppress(EngineLost):  # what it would forget is gone
            await self.link.post(method, **arguments)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

"""vLLM's scheduler with less work for rows that decode; vLLM calls `make_scheduler` by its name.

At each step vLLM asks for every running request which images it is to read and which blocks of the KV cache it needs. A request
that decodes reads no images, and needs a block once in as many steps as a block has tokens. Both are known without asking, and a
step of hundreds of rows then costs the host less. Where each row decodes one more token, and as many drafts by a head, the plan
of the step before is used again. And vLLM makes no output for a row that only becomes longer: its tokens come with the next
output that it has.

A recurrent state exists only after the step that computes it. A sample that needs it waits for the next step, and in vLLM's queue
all later requests wait too; next to drafts by a head it would not wait, but read its prompt again. So one step reads the first
samples of several prompts, and the other samples continue from their states.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, cast

import torch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rollout.drafts import payoff_on
from rollout.vllm.process_settings import BY_HEAD


def make_scheduler(vllm_config: Any, kv_cache_config: Any, **options: Any) -> Scheduler:
    """The scheduler of an engine, in vLLM's asynchronous form or its other one, as the engine is configured."""
    kind = DecodingAsyncScheduler if vllm_config.scheduler_config.async_scheduling else DecodingScheduler
    return kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **options)


SAME_ROWS = ("scheduled_cached_reqs", "scheduled_spec_decode_tokens", "num_", "total_num_")
"""Beginnings of the names of the fields that a plan has if each row decodes and nothing else happens."""
PLACEHOLDER = -1
"""Of a draft that stays on the device."""
SETTLED = 8
"""After so many tokens of a response, and of each block, vLLM has freed the older states of a recurrent row."""
UNTOLD = "untold_token_ids"
"""The attribute of a request that holds its tokens of which vLLM has made no output yet."""
PUT_OFF = "put_off"
"""The attribute of a request that vLLM has put off at least once: tokens of an earlier step may come that no longer count."""


class _Decoding:
    """What both forms leave out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.dynamic_sd_lookup = None  # drafts are decided on here, or by n-grams in the policy's sampler
        config = options["vllm_config"]
        self._by_head = getattr(config.speculative_config, "method", None) == BY_HEAD
        alone = self._by_head and config.parallel_config.world_size == 1  # else ranks have to take the same steps
        self._payoff = payoff_on(torch.device(config.device_config.device_type) if alone else None)
        kinds = {type(group.kv_cache_spec).__name__ for group in options["kv_cache_config"].kv_cache_groups}
        self._slots: HeldSlots | None = None
        self._plan: Any = None  # of the last step, if it can be used again
        self._drafts: int | None = None  # of each row in it
        if kinds <= {"FullAttentionSpec", "MambaSpec"}:
            own: Any = self
            held = own.kv_cache_manager.allocate_slots = HeldSlots(
                own.kv_cache_manager, SETTLED * ("MambaSpec" in kinds)
            )
            self._slots = None if own.connector else held

    def schedule(self, *settings: Any, **options: Any) -> Any:
        """The plan of the next step; see vLLM."""
        if (plan := self._same_rows()) is None:
            later = self._take_waiting_samples()
            plan = super().schedule(*settings, **options)  # type: ignore[misc]
            cast(Any, self).waiting.extend(later)
            rows = plan.scheduled_cached_reqs
            other = any(getattr(plan, each.name) for each in fields(plan) if not each.name.startswith(SAME_ROWS))
            other = other or bool(rows.resumed_req_ids or rows.all_token_ids or rows.new_token_ids)
            self._drafts = drafts_of_each(plan)
            self._plan = None if other or self._drafts is None else plan
        return plan

    def _same_rows(self) -> Any:
        """The last plan for the next token of each row, and for as many drafts; ``None`` where something else happens."""
        own: Any = self
        plan, slots, drafts = self._plan, self._slots, self._drafts or 0
        begins = own.get_request_counts()[1] and len(own.running) < own.max_num_running_reqs
        if plan is None or slots is None or begins or own.finished_req_ids or own.pause_state:
            return None
        names, rows, longest = plan.scheduled_cached_reqs.req_ids, own.running, own.max_model_len
        least = slots.settled * (1 + drafts)
        settled = all(decodes(row, longest, drafts) and row.num_output_tokens >= least for row in rows)
        if names != [row.request_id for row in rows] or not settled:
            return None
        ahead, manager = own.num_lookahead_tokens, own.kv_cache_manager
        full = [row for row in rows if not slots.hold(row, row.num_computed_tokens + 1 + drafts, ahead, drafts)]
        if len(full) * len(slots.groups) * (1 + drafts) > manager.block_pool.get_num_free_blocks():
            return None
        blocks = {row.request_id: slots(row, 1 + drafts, ahead).get_block_ids(allow_none=True) for row in full}
        told = replace(
            plan.scheduled_cached_reqs,
            new_block_ids=[blocks.get(name) for name in names],
            num_computed_tokens=[row.num_computed_tokens for row in rows],
            num_output_tokens=[row.num_output_tokens + row.num_output_placeholders for row in rows],
        )
        zeroed = {"new_block_ids_to_zero": manager.take_new_block_ids() or None} if own.needs_kv_cache_zeroing else {}
        self._plan = replace(plan, scheduled_cached_reqs=told, **zeroed)
        own._update_after_schedule(self._plan)
        return self._plan

    def _update_after_schedule(self, plan: Any) -> None:
        """Called with each plan; see vLLM. Says how many tokens the head drafts after this step, for the next."""
        own: Any = self
        if self._by_head:
            drafts = self._payoff is None or self._payoff.drafts(len(plan.num_scheduled_tokens), self._reads(plan))
            plan.num_spec_tokens_to_schedule = own.num_spec_tokens if drafts else 0
        super()._update_after_schedule(plan)  # type: ignore[misc]

    def _reads(self, plan: Any) -> bool:
        """Whether some row reads more than its last token and drafts."""
        drafted = sum(map(len, plan.scheduled_spec_decode_tokens.values()))
        return bool(plan.total_num_scheduled_tokens != len(plan.num_scheduled_tokens) + drafted)

    def _note_pass(self, plan: Any, sampled: Sequence[Sequence[int]]) -> None:
        """A step has ended in which each row ``sampled`` these tokens."""
        own: Any = self
        rows, drafts = plan.num_scheduled_tokens, plan.scheduled_spec_decode_tokens
        if self._payoff is not None:
            if self._reads(plan) or not any(name in own.requests for name in rows):  # it ended an earlier run
                self._payoff.restart()
            self._payoff.passed(len(rows), sum(map(len, sampled)), bool(drafts))

    def _preempt_request(self, request: Any, *given: Any, **options: Any) -> None:
        vars(request)[PUT_OFF] = True
        super()._preempt_request(request, *given, **options)  # type: ignore[misc]

    def update_from_output(self, plan: Any, output: Any) -> Any:
        """The outputs of the step ``plan``, by client, from what the model has returned; see vLLM.

        A row that only becomes longer has no output. Its tokens are in the next output that it has.
        """
        own: Any = self
        self._note_pass(plan, output.sampled_token_ids)
        left = self._add_tokens(plan, output)
        requests = {name: own.requests.get(name) for name in left}
        found = super().update_from_output(replace(plan, num_scheduled_tokens=left), output)  # type: ignore[misc]
        for told in [each for client in found.values() for each in client.outputs]:
            request = requests.get(told.request_id)
            untold = [] if request is None else vars(request).pop(UNTOLD, [])
            told.new_token_ids = [*untold, *told.new_token_ids]
        return found

    def _add_tokens(self, plan: Any, output: Any) -> dict[str, int]:
        """Adds the new tokens to each row that only becomes longer. Returns the numbers of scheduled tokens of all other rows, by
        name; vLLM adds their tokens.
        """
        own: Any = self
        slots, rows, found = self._slots, plan.num_scheduled_tokens, output.sampled_token_ids
        if slots is None or self._reads(plan) or not found:
            return rows
        left, known, places = {}, own.requests, output.req_id_to_index
        longest, unit, ahead = own.max_model_len, slots.unit, own._ahead
        for name in rows:
            request, tokens = known.get(name), found[places[name]]
            if request is None or not only_becomes_longer(request, tokens, longest, unit):
                left[name] = rows[name]
                continue
            request.append_output_token_ids(tokens)
            request.num_computed_tokens -= rows[name] - len(tokens)  # the drafts that do not count
            request.num_output_placeholders -= ahead * rows[name]
            if hasattr(request, "num_in_flight_tokens"):  # since vLLM 0.32
                request.num_in_flight_tokens -= rows[name]
            vars(request).setdefault(UNTOLD, []).extend(tokens)
        return left

    def _take_waiting_samples(self) -> list[Any]:
        """Takes requests off the queue that do not begin in this step, and returns them.

        Among the requests that have room to begin, these are the samples of a prompt that another sample is reading. If there
        are some, the requests behind the room wait too.
        """
        own: Any = self
        room = min(own.max_num_running_reqs - len(own.running), len(own.waiting))
        if room < 1 or not own.has_mamba_layers or not isinstance(own.waiting, deque):
            return []
        unit = own.kv_cache_manager.block_pool.hash_block_size

        def units(row: Any) -> int:
            """The units of a prompt that a sample can find in the cache. The state is at their end, or, next to drafts by a head,
            one unit earlier.
            """
            return int(row.num_prompt_tokens - (not self._by_head)) // unit

        def prompt(row: Any) -> Any:
            last = units(row)
            return row.block_hashes[last - 1] if self._by_head < last <= len(row.block_hashes) else row.request_id

        reads = [row for row in own.running if row.num_computed_tokens < row.num_prompt_tokens]
        kept: dict[Any, bool | None] = dict.fromkeys(map(prompt, reads), False)  # None: not looked up yet
        begin: list[Any] = []
        wait: list[Any] = []
        for row in [own.waiting.popleft() for _ in range(room)]:
            key = prompt(row)
            if kept.get(key, True) is None:
                kept[key] = own.kv_cache_manager.get_computed_blocks(row)[1] >= (units(row) - self._by_head) * unit
            (wait if kept.setdefault(key, None) is False else begin).append(row)
        if wait:
            wait += own.waiting
            own.waiting.clear()
        own.waiting.extendleft(reversed(begin))
        return wait

    def _try_schedule_encoder_inputs(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int, *budget: Any, **shift: Any
    ) -> Any:
        """The images that a request is to read in this step, and the tokens that it then can read."""
        own = super()._try_schedule_encoder_inputs  # type: ignore[misc]
        if num_computed_tokens < request.num_prompt_tokens:
            return own(request, num_computed_tokens, num_new_tokens, *budget, **shift)
        nothing = own(request, num_computed_tokens, 0, *budget, **shift)  # its form differs between versions
        return nothing[0], num_new_tokens, *nothing[2:]


def drafts_of_each(plan: Any) -> int | None:
    """How many drafts on the device each row of a plan has, if each decodes; ``None`` if rows differ or drafts are known."""
    rows, drafts = len(plan.scheduled_cached_reqs.req_ids), plan.scheduled_spec_decode_tokens
    count = len(next(iter(drafts.values()), ()))
    equal = not drafts or (len(drafts) == rows and all(each == [PLACEHOLDER] * count for each in drafts.values()))
    return count if equal and plan.total_num_scheduled_tokens == rows * (1 + count) else None


def decodes(request: Any, longest: int, drafts: int = 0) -> bool:
    """Whether all that a request can do next is to decode one token, with which and with its ``drafts`` it has at most
    ``longest`` of them.
    """
    read, coming = request.num_computed_tokens, request.num_output_placeholders
    limit = request.num_prompt_tokens + request.max_tokens
    one = request.num_tokens_with_spec + coming - read == 1 + drafts and len(request.spec_token_ids) == drafts
    return one and not request.is_prefill_chunk and read + 2 - coming < limit and read + 2 + drafts <= longest


def only_becomes_longer(request: Any, tokens: Sequence[int], longest: int, unit: int) -> bool:
    """Whether the next ``tokens`` of a request only make it longer: the response has begun, they do not end it, and no block of
    ``unit`` tokens becomes full, of which vLLM would note the hash.
    """
    read, more = request.num_tokens, len(tokens)
    room = (
        0 < read % unit < unit - more
        and read + more < longest
        and request.num_output_tokens < request.max_tokens - more
    )
    plain = room and request.status is RequestStatus.RUNNING and PUT_OFF not in vars(request)
    stops = request.sampling_params.stop_token_ids
    return bool(tokens) and plain and request.num_output_tokens >= 2 and not any(token in stops for token in tokens)


class DecodingScheduler(_Decoding, Scheduler):
    """vLLM's scheduler that waits for the tokens of a step before it prepares the next."""

    _ahead = 0  # steps that are planned before the tokens of the last one are known


class DecodingAsyncScheduler(_Decoding, AsyncScheduler):
    """vLLM's scheduler that prepares a step while the device computes another."""

    _ahead = 1


class HeldSlots:
    """A manager's ``allocate_slots`` that asks for blocks only where a request's own have no room for its next token."""

    def __init__(self, manager: Any, settled: int) -> None:
        """``settled``: the number of tokens of a response, and of each block, for which a row always asks; see `SETTLED`."""
        self._own, self._nothing, self.settled = manager.allocate_slots, manager.empty_kv_cache_blocks, settled
        self.groups = [
            (group.req_to_blocks, group.block_size, getattr(group, "num_speculative_blocks", 0))
            for group in manager.coordinator.single_type_managers
        ]
        self.unit = math.gcd(manager.block_pool.hash_block_size, *(size for _, size, _ in self.groups))

    def __call__(self, request: Any, num_new_tokens: int, num_lookahead_tokens: int = 0, **options: Any) -> Any:
        """New blocks for the next tokens of a request, ``None`` if there are none left; see vLLM."""
        decoding = num_new_tokens == 1 and not options and request.status == RequestStatus.RUNNING
        if decoding and self.hold(request, request.num_computed_tokens + 1, num_lookahead_tokens):
            return self._nothing
        return self._own(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens, **options)

    def hold(self, request: Any, tokens: int, ahead: int, drafts: int = 0) -> bool:
        """Whether a request's own blocks have room for so many of its tokens, ``drafts`` of which a step may take back, and for
        drafts of ``ahead`` more.
        """
        name, settled = request.request_id, self.settled * (1 + drafts)
        for blocks, size, kept in self.groups:
            if tokens + ahead > (len(blocks.get(name, ())) - kept) * size or (tokens - 1) % size < settled:
                return False
        return not settled or request.num_output_tokens >= settled

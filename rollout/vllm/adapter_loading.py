"""Hands vLLM the adapters of requests: from memory while they are there, and else from their files."""

import logging
import time
from typing import Any
from weakref import WeakValueDictionary

from rollout.adapters import Adapter
from rollout.adapters.adapter import UP
from rollout.adapters.adapter_files import PREFIX

log = logging.getLogger(__name__)
Handed = WeakValueDictionary[int, Adapter]
"""Adapters by vLLM's numbers of them."""


def hand_over(worker: Any, handed: Handed) -> None:
    """Lets a worker take the adapters that are in ``handed`` when it needs them, and log how long each takes to load.

    Reading the files of an adapter, it would copy each matrix into pinned memory of its own.
    """
    manager = worker.model_runner.lora_manager
    manager._lora_model_cls = from_memory(manager._lora_model_cls, handed)
    add = manager.add_adapter

    def added(request: Any) -> bool:
        known = request.lora_int_id in manager.list_adapters()
        began = time.perf_counter()
        loaded: bool = add(request)
        if not known:
            log.info("adapter %s: loaded %.3f s", request.lora_name, time.perf_counter() - began)
        return loaded

    manager.add_adapter = added


def from_memory(kind: Any, handed: Handed) -> Any:
    """vLLM's class of adapters, with one that is ``handed`` over in place of its files."""

    class AdapterFromMemory(kind):
        @classmethod
        def from_local_checkpoint(
            cls, lora_dir: str, expected_lora_modules: set[str], peft_helper: Any, **options: Any
        ) -> Any:
            adapter = handed.get(options["lora_model_id"])
            named = {} if adapter is None else dict(adapter.named_parameters())
            unknown = [name for name in named if name.split(".")[-3] not in expected_lora_modules]
            if not named or unknown:  # which vLLM refuses
                return super().from_local_checkpoint(lora_dir, expected_lora_modules, peft_helper, **options)
            taken = ("lora_model_id", "model_vocab_size", "weights_mapper", "skip_prefixes")
            dtype = options["dtype"]
            return cls.from_lora_tensors(
                tensors={PREFIX + name: each.to(dtype, copy=name.endswith(UP)) for name, each in named.items()},
                peft_helper=peft_helper,
                device=str(next(iter(named.values())).device),
                dtype=dtype,
                **{name: options[name] for name in taken if name in options},
            )

    return AdapterFromMemory

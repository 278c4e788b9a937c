"""How vLLM gets the adapters of requests."""

import logging
import time
from typing import Any

log = logging.getLogger(__name__)


def log_loading(worker: Any) -> None:
    """Lets the worker log the seconds that each adapter takes until it can be sampled from."""
    manager = worker.model_runner.lora_manager
    add = manager.add_adapter

    def added(request: Any) -> bool:
        known = request.lora_int_id in manager.list_adapters()
        began = time.perf_counter()
        loaded: bool = add(request)
        if not known:
            log.info("adapter %s: loaded %.3f s", request.lora_name, time.perf_counter() - began)
        return loaded

    manager.add_adapter = added

"""Low-rank adapters (LoRA, arXiv:2106.09685) of one frozen model, many in one pass: trained ones and snapshots."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from rollout.adapters.adapter import Adapter, AdapterConfig, new_adapter
    from rollout.adapters.adapter_files import read_adapter, write_adapter
    from rollout.adapters.adapter_requests import AdapterRequest, PromptScores
    from rollout.adapters.router import AdapterRouter, Run

__all__ = [
    "Adapter",
    "AdapterConfig",
    "AdapterRequest",
    "AdapterRouter",
    "PromptScores",
    "Run",
    "new_adapter",
    "read_adapter",
    "write_adapter",
]

__getattr__ = lazy_names(__name__, ".adapter", ".adapter_files", ".adapter_requests", ".router")

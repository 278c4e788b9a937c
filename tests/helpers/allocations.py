"""What a pass of the packed model allocates on one rank."""

import weakref
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from dataproto import DataProto
from dataproto.vlm import family_of
from helpers.batches import prompt_batch, with_responses
from helpers.forward_rows import forward_rows
from helpers.layouts import CPU, TEMPERATURE, config_with_heads, joined
from helpers.tiny_models import tiny_model
from workers.model.model_config import ModelConfig
from workers.model.packed_model import PackedVLM
from workers.parallel import parallelize
from workers.ranks.layout import Layout
from workers.training.forward_pass import PreparedRows


class Allocations(TorchDispatchMode):
    """The tensors that operations make in the block, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.live = 0  # bytes
        self.tokens: dict[int, int] = {}  # by width: the most rows of a tensor
        self._seen = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.is_floating_point() and made.ndim:
                self._count(made)
        return out

    def _count(self, made: torch.Tensor) -> None:
        storage, width = made.untyped_storage(), made.shape[-1]
        if storage not in self._seen:  # no view
            self.tokens[width] = max(self.tokens.get(width, 0), made.numel() // max(width, 1))
            self._seen[storage] = size = storage.nbytes()
            weakref.finalize(storage, self._free, size)
            self.live += size
            self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size


class Found(NamedTuple):
    """What a pass allocates on this rank."""

    peak: int  # bytes
    states: int  # the most rows of a tensor as wide as the hidden states
    logits: int  # the most rows of a tensor as wide as the vocabulary
    tokens: int  # of the packed sequence


def long_rows(config: Any) -> DataProto:
    """Four rows with images of their own; almost all responses lie in the second half of the sequence."""
    sizes = [(12, 12), (16, 8), (8, 16), (12, 8)]
    prompts = prompt_batch(config, [[size] for size in sizes], texts=[300, 250, 10, 10])
    return with_responses(config, prompts, lengths=[1, 1, 250, 200], width=250)


def config_of(model_type: str) -> Any:
    """`tiny_config` with heads for four ranks."""
    return config_with_heads(model_type, heads=4, key_value_heads=4)


def allocated(model_type: str, layout: Layout) -> Found:
    """What one forward and backward pass over `long_rows` allocates on the calling rank."""
    config = config_of(model_type)
    module = PackedVLM(tiny_model(model_type, config=config), family_of(config), TEMPERATURE)
    parallelize(module, joined(layout), ModelConfig())
    forward_rows(module, long_rows(config)[:1], CPU)  # sets FSDP up
    prepared = PreparedRows(module, long_rows(config))
    tokens = prepared.tokens(module, CPU)
    media, spans, _ = prepared.media(module, CPU)
    with Allocations() as made:
        log_probs, entropies, _ = module(tokens, media, spans, True)
        (log_probs + entropies).sum().backward()
    text = config.get_text_config()
    states, logits = (made.tokens.get(width, 0) for width in (text.hidden_size, text.vocab_size))
    return Found(made.peak, states, logits, tokens.input_ids.shape[-1])


def check_share(found: Found, whole: Found, size: int) -> None:
    """A rank has its part of the states and of the logits, and not much more of the peak, in which gathered weights are whole."""
    assert 0 <= found.tokens - whole.tokens < 4  # they fill up to a multiple of the ranks
    share = found.tokens / whole.tokens / size
    assert found.states <= whole.states * share + 1
    assert found.logits <= whole.logits * share + 1
    assert found.peak <= whole.peak * share + 2.5e6

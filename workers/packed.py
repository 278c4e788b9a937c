"""The model as training sees it: packed rows in, log-probs of response tokens out."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from dataproto.batching import PackedRows
from dataproto.errors import InvalidConfig
from dataproto.vlm import MediaSpans, VLMFamily
from workers.attention import use_packed_attention
from workers.logprobs import token_log_probs


@dataclass(frozen=True)
class Outputs:
    """What a loss function sees of a forward pass."""

    log_probs: Tensor  # (B, R) float32, 0 where response_mask is 0
    entropy_or_none: Tensor | None = None

    @property
    def entropy(self) -> Tensor:
        """``(B, R)`` entropy of the policy at each response token, in nats, with gradient."""
        if self.entropy_or_none is None:
            raise InvalidConfig("the entropy was not computed: pass entropy=True to update() or log_probs()")
        return self.entropy_or_none


class PackedVLM(nn.Module):
    """A Hugging Face VLM behind one packed forward; the root that parallel wrappers wrap."""

    def __init__(self, model: PreTrainedModel, family: VLMFamily, temperature: float) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model
        self.family = family
        self.temperature = temperature
        self.banned_ids = tuple(family.banned_ids(model.config))

    def forward(
        self, rows: PackedRows, media: Mapping[str, Tensor], spans: MediaSpans, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs ``(N,)`` of the rows' response tokens and, if asked for, entropies ``(N,)``."""
        embeddings, extras = self.family.embed(self.model, rows.input_ids, media, spans)
        hidden = self.family.decode(
            self.model,
            embeddings,
            rows.position_ids,
            extras,
            use_cache=False,
            cu_seq_lens_q=rows.cu_seqlens,
            cu_seq_lens_k=rows.key_cu_seqlens,
            max_length_q=rows.max_length,
            max_length_k=rows.key_max_length,
            key_index=rows.key_index,
        )
        return token_log_probs(
            hidden[0, rows.predictors],
            self.family.lm_head(self.model).weight,
            rows.targets,
            self.temperature,
            self.banned_ids,
            entropy,
        )

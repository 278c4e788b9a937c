"""Deep vision features of packed rows, added at the places of media tokens.

Decoders of Hugging Face find these tokens by a mask: for each level, in forward and backward pass, the host waits until the
device has counted them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from dataproto.errors import InvalidConfig
from dataproto.packing import PackedRows
from dataproto.transfer import pixels_on
from dataproto.vlm import MediaSpans, VLMFamily
from dataproto.vlm.prediction_head import holds_head
from workers.model.attention import use_packed_attention
from workers.model.gated_delta_net import use_packed_recurrence
from workers.model.image_blocks import image_blocks
from workers.model.kept_features import HeldFeatures, KeptFeatures, Wanted
from workers.model.logprobs import token_log_probs
from workers.model.mixture import use_packed_experts
from workers.model.next_tokens import predicted_states
from workers.model.patches import replace_forward, set_on_module
from workers.model.pieces import Pieces


@dataclass(frozen=True)
class Outputs:
    """The outputs of a policy's forward pass, for a loss function."""

    log_probs: Tensor  # (B, R) float32, 0 where response_mask is 0
    entropy_or_none: Tensor | None = None
    head_log_probs: Tensor | None = None
    """``(B, R)`` by the head that predicts the token after the next one, with gradient for it; see `ModelConfig.mtp_coef`."""

    @property
    def entropy(self) -> Tensor:
        """``(B, R)`` entropy of the policy at each response token, in nats, with gradient.

        Raises:
            InvalidConfig: it was not computed.
        """
        if self.entropy_or_none is None:
            raise InvalidConfig("the entropy was not computed: pass entropy=True to update() or log_probs()")
        return self.entropy_or_none

    @property
    def scores(self) -> Tensor:
        """The model's value for each response token, with gradient; of a policy the log-probs."""
        return self.log_probs


class TokenShare:
    """The packed tokens that this process computes: all of them, unless ranks share one sequence.

    Ranks that share a sequence (`workers.parallel.tokens`) get the same rows, and each returns all log-probs.
    """

    def rows(self, rows: PackedRows, spans: MediaSpans) -> tuple[PackedRows, Sequence[MediaSpans]]:
        """The rows with this process's part of ``input_ids`` and ``position_ids``, and the media spans, on the host, among the
        tokens of each of the processes that share the sequence.
        """
        return rows, [spans]

    def num_states(self, tokens: int) -> int:
        """The number of hidden states between layers that this process has for a sequence of ``tokens``."""
        return tokens

    def filled(self, tokens: int) -> int:
        """How long `rows` makes a sequence of ``tokens``; on the host, sequences are filled up without a wait."""
        return tokens

    def attention(self) -> dict[str, Any]:
        """Additional keyword arguments for the attention function of the language model."""
        return {}

    def states(self, hidden: Tensor, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """The states ``(n, H)`` that predict response tokens, of this process's ``(S, H)``, and their targets ``(n,)``."""
        return select_rows(hidden, rows.predictors), rows.targets

    def join(self, values: Tensor, rows: PackedRows) -> Tensor:
        """Joins values ``(n,)`` of this process's targets to those ``(N,)`` of all targets."""
        return values


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` for ``x`` ``(S, H)`` and an index with repeated rows, with a deterministic gradient.

    `torch.nn.functional.embedding` adds the gradients of repeated rows in a fixed order; those of an indexing operation are added
    by several threads in any order.
    """
    return embedding(index, x)


@dataclass(frozen=True)
class MediaPart:
    """The media of a micro-batch that this process encodes: pixels on its device, grids on the host."""

    inputs: Mapping[str, Tensor]
    holders: Tensor | None = None  # (F,) the rank that holds each feature of all media; None: this process holds all
    used: bool = True  # false for a dummy image, whose features are dropped


class EncodedMedia:
    """The features of a `MediaPart`, computed before the forward pass that takes them.

    It is no dataclass, because FSDP looks for tensors in those: it frees the root's weights once it has the gradient of an
    argument, and the gradient of a projector among these weights comes later.
    """

    def __init__(self, features: HeldFeatures) -> None:
        self.features = features


@dataclass(frozen=True)
class TowerFeatures:
    """The features of media by the vision tower, and where they are placed among this process's tokens."""

    family: VLMFamily

    def share(self, config: Any, media: Mapping[str, Tensor], device: torch.device) -> MediaPart:
        """This process's part of media that lie on the host."""
        return MediaPart(pixels_on(media, device))

    def encode(self, model: PreTrainedModel, part: MediaPart) -> HeldFeatures:
        """The features of this process's part."""
        features = self.family.features(model, part.inputs)
        features = features if part.used else features[:0]
        holders = torch.zeros(len(features), dtype=torch.int64) if part.holders is None else part.holders
        return HeldFeatures(features, holders, self.rank)

    def deliver(self, held: HeldFeatures, windows: Sequence[MediaSpans]) -> tuple[Tensor, MediaSpans]:
        """The features ``(F, levels, H)`` that this process's tokens need, and the spans that place them there.

        Args:
            windows: what `TokenShare.rows` returns.
        """
        return held.mine, windows[self.rank]

    @property
    def rank(self) -> int:
        """This process among those that share the sequence."""
        return 0


class PackedVLM(nn.Module):
    """A Hugging Face VLM with one packed forward; the root module of FSDP.

    Transforms in `workers.parallel` replace ``tokens``, ``features``, ``score`` and, for pipeline stages, ``forward``.
    """

    outputs: Callable[[Tensor, Tensor | None], Any] = Outputs
    """Builds the argument of a loss function from scores and entropies ``(B, R)``."""

    routing_shape: tuple[int, int]
    """Layers with experts, and experts of a token; 0 without any."""

    replays_routing = False
    """Whether tokens are sent to the experts that the rows' ``routed_experts`` name, instead of those that routers choose."""

    makes_logits = True
    """Whether the head computes logits over the vocabulary; a critic's does not."""

    float32_parts: tuple[str, ...] = ()
    """Paths of modules next to ``model`` whose weights are used in float32 whatever the model computes in."""

    def __init__(self, model: PreTrainedModel, family: VLMFamily, temperature: float) -> None:
        super().__init__()
        use_packed_attention(model)
        use_packed_recurrence(model, family)
        use_placed_levels(model, family)
        self.routing_shape = use_packed_experts(model, family)
        use_linear_patch_embedding(model)
        self.model = model
        self.family = family
        self.temperature = temperature
        self.logit_cap = family.logit_cap(model.config)
        self.banned_ids = tuple(family.banned_ids(model.config))
        self.tokens = TokenShare()
        self.features = TowerFeatures(family)
        self.score = token_log_probs
        self.kept: KeptFeatures | None = None  # of a tower that is not trained

    def encode(self, media: MediaPart) -> EncodedMedia:
        """The features of media for the next call. FSDP's root has to be gathered, as it is from a call to the end of its
        backward pass.
        """
        return EncodedMedia(self.features.encode(self.model, media))

    def forward(
        self,
        rows: PackedRows,
        media: MediaPart | EncodedMedia | None,
        spans: MediaSpans,
        entropy: bool = False,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs ``(N,)`` of the rows' response tokens, entropies ``(N,)`` with ``entropy``, and those log-probs by the
        head that predicts the token after the next one, where it is trained.

        ``media`` is ``None`` if the tower does not run; it may be encoded already. With ``wanted`` it has what is not kept.
        """
        mine, windows = self.tokens.rows(rows, spans)
        features, places = self.media_features(media, windows, rows.input_ids.device, wanted)
        embeddings, extras = self.merge(mine.input_ids, features, places)
        hidden = self.decode(embeddings, extras, mine)
        scores, entropies = self.finish(hidden, mine, entropy)
        ahead = self.predict(embeddings, hidden, mine) if self.predicts and torch.is_grad_enabled() else None
        return scores, entropies, ahead

    def media_features(
        self,
        media: MediaPart | EncodedMedia | None,
        windows: Sequence[MediaSpans],
        device: torch.device,
        wanted: Wanted | None = None,
    ) -> tuple[Tensor | None, MediaSpans]:
        """The features ``(F, levels, H)`` that this process's tokens need, ``None`` without media, and where they are placed."""
        held = None if media is None else (media if isinstance(media, EncodedMedia) else self.encode(media)).features
        if wanted is not None:
            held = wanted.joined(held)
        if held is None:
            return None, windows[self.features.rank].to(device)
        features, places = self.features.deliver(held, windows)
        return features, places.to(device)

    def merge(
        self, input_ids: Tensor, features: Tensor | None, places: MediaSpans | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings ``(1, S, H)`` of this process's tokens, and the decoder's keywords for further levels of the features."""
        embeddings, extras = self.family.merge(self.model, input_ids, features, places)
        return embeddings, extras if places is None else self.family.placed_extras(extras, places)

    def forget_features(self) -> None:
        """Forgets kept features; called where a step ends, and where the weights of the tower may change."""
        if self.kept is not None:
            self.kept.clear()

    def decode(self, embeddings: Tensor, extras: Mapping[str, Any], rows: PackedRows) -> Tensor:
        """The decoder's output ``(1, S, H)`` for this process's tokens; ``rows`` are those of `TokenShare.rows`."""
        mutual = self.family.mutual_images(self.model.config)
        blocks = {"image_blocks": image_blocks(rows, mutual == "windowed")} if mutual else {}
        return self.family.decode(
            self.model,
            embeddings,
            rows.position_ids,
            extras,
            cu_seq_lens_q=rows.cu_seqlens,
            cu_seq_lens_k=rows.key_cu_seqlens,
            max_length_q=rows.max_length,
            max_length_k=rows.key_max_length,
            key_index=rows.key_index,
            **blocks,
            **self._recurrence(rows),
            **self.tokens.attention(),
            **self._routing(rows),
        )

    def _recurrence(self, rows: PackedRows) -> dict[str, tuple[Tensor, Tensor]]:
        """Keywords of `workers.model.gated_delta_net.packed_gated_delta_net`, which only recurrent layers take."""
        if self.family.recurrent_mixers is None:
            return {}
        pieces = Pieces.of(rows.cu_seqlens, rows.key_cu_seqlens, rows.key_index)
        return {"taps": pieces.taps(self.model.config.get_text_config().linear_conv_kernel_dim)}

    def _routing(self, rows: PackedRows) -> dict[str, Tensor | None]:
        """Keywords of `workers.model.mixture.RoutedLayer`, which only layers of a mixture take."""
        if self.family.experts is None:
            return {}
        return {"routed_experts": rows.routed_experts, "routed": rows.routed}

    def finish(self, hidden: Tensor, rows: PackedRows, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Log-probs ``(N,)`` and, with ``entropy``, entropies ``(N,)``, from states ``(1, S, H)``."""
        scores, entropies = self.head(*self.tokens.states(hidden[0], rows), entropy)
        return self.tokens.join(scores, rows), None if entropies is None else self.tokens.join(entropies, rows)

    def predict(self, embeddings: Tensor, hidden: Tensor, rows: PackedRows) -> Tensor:
        """Log-probs ``(N,)`` of response tokens by the head that predicts the token after the next one, or 0."""
        states, predicted = predicted_states(self.model, self.family, embeddings, hidden, rows)
        weight = self.family.lm_head(self.model).weight.detach()
        policy = self.temperature, self.banned_ids
        scores, _ = self.score(states, weight, rows.targets, *policy, cap=self.logit_cap)
        return scores.where(predicted, 0.0)

    @property
    def predicts(self) -> bool:
        """Whether the model has such a head, which is trained."""
        return holds_head(self.model, self.family)

    def head(self, states: Tensor, targets: Tensor, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Scores ``(n,)`` of ``targets`` ``(n,)`` and, with ``entropy``, entropies, from states ``(n, H)`` that predict them."""
        weight = self.family.lm_head(self.model).weight
        return self.score(states, weight, targets, self.temperature, self.banned_ids, entropy, cap=self.logit_cap)


# Parts of a model that compute in another way than in Hugging Face


def use_placed_levels(model: nn.Module, family: VLMFamily) -> None:
    """Makes the decoder of ``model``, if its family has deep features, add their levels by `add_level`.

    Decoders of Hugging Face find the tokens of media by a mask: for each level, in forward and backward pass, the host waits
    until the device has counted them.
    """
    if family.deep_method:
        set_on_module(model.get_submodule(family.language_model), family.deep_method, add_level)


def add_level(states: Tensor, places: Tensor | None, level: Tensor) -> Tensor:
    """States ``(1, L, H)`` with a level ``(M, H)`` added at the ``places (M,)``, each of which occurs once; ``None`` is all L.

    >>> import torch
    >>> add_level(torch.zeros(1, 3, 2), torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]]
    """
    level = level.to(states.dtype)[None]
    return states + level if places is None else states.index_add(1, places, level)


def use_linear_patch_embedding(model: nn.Module) -> None:
    """Replaces the forward function of each convolution that may process single patches, in place; weights do not change.

    Vision towers of Hugging Face embed each image patch by a convolution whose kernel is as large as the patch. A matrix product
    gives the same result, several times faster in forward and backward pass.
    """
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)) and module.stride == module.kernel_size and module.groups == 1:
            replace_forward(module, LinearPatchEmbedding(module))


class LinearPatchEmbedding:
    """The forward function of a convolution, as a matrix product if the input is as large as the kernel.

    Pixels get the dtype of the weights, which Kimi's tower leaves to its caller. Only here it is known: FSDP casts weights as it
    gathers them.

    >>> import torch
    >>> convolution, patches = nn.Conv3d(1, 2, (1, 2, 2)), torch.arange(12.0).view(3, 1, 1, 2, 2)
    >>> torch.allclose(LinearPatchEmbedding(convolution)(patches), convolution(patches))
    True
    """

    def __init__(self, convolution: Any) -> None:
        self.convolution = convolution

    def __call__(self, input: Tensor) -> Tensor:
        """``(patches, C, *kernel)`` to ``(patches, out, 1, ..)``, as the convolution returns it."""
        conv = self.convolution
        input = input.to(conv.weight.dtype)
        if tuple(input.shape[2:]) != conv.kernel_size or conv.padding not in ("valid", (0,) * len(conv.kernel_size)):
            return type(conv).forward(conv, input)
        return linear(input.flatten(1), conv.weight.flatten(1), conv.bias)[(..., *[None] * len(conv.kernel_size))]

"""`VLMFamily`: everything that is specific to one family of vision-language models.

A family is a subclass in a file of its own that overrides what differs; `dataproto.vlm.family_registry` finds it by model type.
Methods read Hugging Face configs and models by attribute, so importing a family imports no transformers. Submodules are only used
by their paths: a model may be wrapped or sharded as long as these paths exist.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dataproto.errors import InvalidConfig, MediaMismatch
from dataproto.transfer import move, move_readable
from dataproto.vlm.costs import ForwardCosts
from dataproto.vlm.media import MediaSpans, place
from dataproto.vlm.prompt_layout import PromptLayout

TensorPlan = tuple[tuple[str, str], ...]

DECODER_PLAN: TensorPlan = (
    ("model.language_model.layers.*.self_attn.q_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.k_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.v_proj", "colwise"),
    ("model.language_model.layers.*.self_attn.o_proj", "rowwise"),
    ("model.language_model.layers.*.mlp.gate_proj", "colwise"),
    ("model.language_model.layers.*.mlp.up_proj", "colwise"),
    ("model.language_model.layers.*.mlp.down_proj", "rowwise"),
    ("lm_head", "colwise"),
)
"""Tensor-parallel plan of a dense decoder. The vision tower is replicated."""

EXPERT_PLAN: TensorPlan = (
    ("model.language_model.layers.*.mlp.experts.gate_up_proj", "packed_colwise"),
    ("model.language_model.layers.*.mlp.experts.down_proj", "rowwise"),
)
"""Tensor-parallel plan of fused experts."""


def transformers_release() -> tuple[int, ...]:
    """The installed one, such as ``(5, 24)``."""
    return tuple(map(int, version("transformers").split(".")[:2]))


class SoftCap(NamedTuple):
    """The soft cap c of logits z with their scale s: they become ``c * tanh(s * z / c)``."""

    cap: float
    scale: float = 1.0

    def apply_(self, logits: Tensor) -> Tensor:
        """The logits with scale and cap. May change those that are given.

        >>> [round(each, 3) for each in SoftCap(2.0, scale=0.5).apply_(torch.tensor([0.1, 100.0])).tolist()]
        [0.05, 2.0]
        """
        return logits.div_(self.cap / self.scale).tanh_() * self.cap


class VLMFamily(PromptLayout, ForwardCosts):
    """A family of vision-language models. The defaults are those that Qwen-VL and its relatives share.

    Families have no state: two instances of a class are equal, hash and pickle alike, and attributes cannot be set. To change a
    family, subclass it.

    Letters: B rows, L tokens (of prompts P, of responses R), T packed tokens, F media features, H hidden size.
    """

    model_type: str
    """``config.model_type`` of the checkpoints. ``model_type+text_model_type``: of those with this kind of language model."""
    published: tuple[str, ...] = ()
    """Names of published models of this type."""
    needs_transformers: tuple[int, int] = (5, 16)
    """The oldest release of transformers that computes these models right; see `check_supported`."""
    auto_model: str = "AutoModelForImageTextToText"
    """The class of transformers that loads the checkpoints; see `model_class`."""

    not_in_vllm: str = ""
    """Why vLLM cannot sample from these models as the policy does. Empty: it can."""
    vllm_module: str = ""
    """A module that vLLM must have to run these models: older versions lack it. Empty: all versions run them."""
    rollout_modality: str = ""
    """If not empty, vLLM gets these models' media already processed, all under this one name."""

    # Module paths

    vision_tower: str | None = "model.visual"
    """``None``: the model reads only text."""
    vision_blocks: str | None = "model.visual.blocks"
    """The list of the tower's repeated layers."""
    audio_tower: str | None = None
    """The tower for sound. ``None``: the model reads no sounds."""
    audio_blocks: str | None = None
    """The list of its repeated layers."""
    gated_tower: bool = False
    """The tower's MLP multiplies two products, of which an activation gates one."""
    tower_indexes_grids: bool = False
    """The tower looks up the grid of each patch on its device, in addition to what `grid_arguments` computes from the grids."""
    mergers: tuple[str, ...] = ("model.visual.merger",)
    """Modules, inside or outside of the tower, that join patches into features."""
    language_model: str = "model.language_model"
    embedding: str = "model.language_model.embed_tokens"
    decoder_layers: str = "model.language_model.layers"
    final_norm: str = "model.language_model.norm"
    head: str = "lm_head"
    recurrent_mixers: str | None = None
    """Pattern of the modules that mix tokens by a recurrence instead of attention. ``None``: all layers have attention."""
    prediction_head: str | None = None
    """Prefix, in a checkpoint, of a head that predicts the token after the next one, laid out as Qwen3.5's: two norms, a
    projection, a decoder layer with attention and a norm. ``None``: there is none, or it is not used.
    """
    numbered_layers: bool = False
    """The decoder looks up what it hands to a layer, such as rotary angles, by the layer's number in the whole model."""
    mask_types: str = ""
    """Keyword by which the model's ``create_masks_for_generate`` takes the types of tokens, if images see each other."""
    deep_method: str = ""
    """Method ``(states, mask, level)`` of the language model that adds a level of deep features after a layer. The packed model
    replaces it: the mask is then what `placed_extras` gives.
    """
    layer_input_parts: tuple[str, ...] = ()
    """Modules that make the inputs of `layer_inputs`. Only the first stage of a pipeline holds them."""
    layer_input_method: str = ""
    """Method ``(embeddings, inputs)`` of the language model that makes `layer_inputs`, which a pipeline stage gets made."""
    float32_weights: tuple[str, ...] = ()
    """Patterns of parameters that stay in float32 where the model computes in a narrower dtype."""
    checkpoint_names: tuple[tuple[str, str], ...] = ()
    """Patterns of names of parameters, of which the first that fits is replaced, and what replaces it in checkpoints."""
    part: str = ""
    """The name of these models in larger ones: checkpoints have a ``<part>_config`` and weights ``<part>.*``. Empty: none."""
    unused_configs: tuple[str, ...] = ()
    """Names in a model's config of the configs of parts that nothing here runs, such as a tower for audio; see `used_config`."""
    unused_weights: tuple[str, ...] = ()
    """Patterns of weights in checkpoints that the model does not load. An export keeps them as they were."""
    unused_files: tuple[str, ...] = ()
    """Files that belong to these weights."""
    experts: str | None = None
    """Pattern of the modules that hold the fused weights ``(experts, ...)`` of a sparse layer. ``None``: all layers are dense."""
    router: str = "gate"
    """Name of the module, next to the experts, that chooses among them; it returns logits, weights and numbers of the chosen."""
    tensor_plan: TensorPlan = DECODER_PLAN
    """Module or parameter patterns with their style: ``colwise``, ``rowwise`` or, for fused weights, ``packed_colwise``."""

    def model_class(self) -> Any:
        """The class `auto_model`, whose ``from_pretrained`` loads a checkpoint and whose ``from_config`` makes a new model."""
        import transformers

        return getattr(transformers, self.auto_model)

    def new_model(self, config: Any) -> Any:
        """A new model of the parts of a config that are used, in float32."""
        return self.model_class().from_config(self.used_config(config), dtype=torch.float32, attn_implementation="sdpa")

    def used_config(self, config: Any) -> Any:
        """The config of the model that is built for a checkpoint: that of its `part`, or a copy without `unused_configs`."""
        if (part := getattr(config, f"{self.part}_config", None)) is not None:
            part.name_or_path = config.name_or_path
            return part
        held = [name for name in self.unused_configs if getattr(config, name, None) is not None]
        if not held:
            return config
        used = copy.deepcopy(config)
        for name in held:
            setattr(used, name, None)
        return used

    def whole_config(self, used: Any, stored: Any) -> Any:
        """The config ``stored`` of a checkpoint with ``used`` in place of its `used_config`."""
        if getattr(stored, f"{self.part}_config", None) is not None:
            setattr(stored, f"{self.part}_config", used)
            return stored
        used.update({name: getattr(stored, name) for name in self.unused_configs})
        return used

    @property
    def towers(self) -> tuple[str, ...]:
        """Module paths of the towers. Empty for a model of text alone."""
        return tuple(path for path in (self.vision_tower, self.audio_tower) if path is not None)

    @property
    def repeated_layers(self) -> tuple[str, ...]:
        """Module paths of the lists of layers of towers and decoder, in the order in which they run."""
        return tuple(path for path in (self.vision_blocks, self.audio_blocks, self.decoder_layers) if path is not None)

    @property
    def vision_parts(self) -> tuple[str, ...]:
        """Module paths of all that turns media into features: towers and mergers. Empty without a tower."""
        return () if self.vision_tower is None else (*self.towers, *self.mergers)

    def expert_layers(self, model: Any) -> list[str]:
        """Names of the modules of `experts` in a model, in the order of the layers."""
        return list(modules_like(model, self.experts))

    def recurrent_modules(self, model: Any) -> dict[str, Any]:
        """The modules that `recurrent_mixers` names, by path."""
        return modules_like(model, self.recurrent_mixers)

    def routers(self, model: Any) -> list[Any]:
        """The modules that choose among the experts of each of `expert_layers`."""
        return [model.get_submodule(f"{name.rpartition('.')[0]}.{self.router}") for name in self.expert_layers(model)]

    def expert_count(self, text: Any) -> int:
        """The experts that a router chooses among, by the config ``text`` of the language model."""
        return int(text.num_experts)

    def experts_per_token(self, text: Any) -> int:
        """The experts that a router chooses for a token, by the config ``text`` of the language model."""
        return int(text.num_experts_per_tok)

    def expert_weights(self, router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
        """The weights ``(S, k)`` that ``router`` gives to the experts ``chosen (S, k)`` int64, by its ``logits (S, E)``.

        By default shares of the softmax over all experts, scaled to a sum of 1 unless the router's config says otherwise.
        """
        shares = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(logits.dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} cannot be changed: override {name!r} in a subclass")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}()"

    # Decoder

    def kind(self, config: Any) -> str:
        """The kind of models of this type that has a family of its own (``model_type+kind``) and the config. Default: none."""
        return ""

    def check_supported(self, config: Any) -> None:
        """Raises `InvalidConfig` for a model of this type that the family does not compute right. Default: all of them, before
        the release of transformers that they need.
        """
        if transformers_release() < self.needs_transformers:
            needed, found = ".".join(map(str, self.needs_transformers)), version("transformers")
            raise InvalidConfig(
                f"models of type {self.model_type} need transformers {needed} or newer, and {found} is installed"
            )

    def undivided_layers(self, config: Any) -> range:
        """Decoder layers that have to be on one pipeline stage, since they share what stages do not send. Default: none."""
        return range(0)

    def mutual_images(self, config: Any) -> Literal["all", "windowed"] | None:
        """In which decoder layers, causal otherwise, each token of an image sees all tokens of the image: in all of them, or in
        those with a sliding window. Default: none.
        """
        return None

    def logit_cap(self, config: Any) -> SoftCap | None:
        """The soft cap of the logits, and their scale before it. Default: none."""
        return None

    # Forward

    def decoder_masks(
        self, model: Any, embeddings: Tensor, attention_mask: Tensor, token_types: Tensor, cache: Any = None
    ) -> Any:
        """What `decode` takes as ``attention_mask`` for padded rows of which ``embeddings (B, L, H)`` are the last L tokens.

        Args:
            attention_mask: ``(B, T)`` of all tokens, those in the cache included; token_types ``(B, T)`` too.
            cache: that of `decode`, before these L tokens are added.

        Default: ``attention_mask``, by which every token sees those before it; with `mask_types` a mask for each kind of layer,
        which transformers makes.
        """
        if not self.mask_types:
            return attention_mask
        make = model.create_masks_for_generate
        given = {cache_argument(make): cache, self.mask_types: token_types, "position_ids": None}
        return make(config=model.config, inputs_embeds=embeddings, attention_mask=attention_mask, **given)

    def features(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Tensor:
        """Features ``(F, levels, H)`` of images, then videos, with every level that `merge` needs."""
        output = self.tower_output(model, media, **vision_kwargs)
        return torch.stack([pooled(output), *map(pooled, self.deep_features(output))], dim=1)

    def tower_output(self, model: Any, media: Mapping[str, Tensor], **vision_kwargs: Any) -> Any:
        """The output of vision tower and mergers for joined media: features ``(F, H)`` of images, then videos, or an object that
        has them as ``pooler_output``.

        Default: one call of the tower with ``pixel_values (patches, dim)`` and ``image_grid_thw (images, 3)``, and the same for
        videos. If grids are on the host, all that depends on them is computed there, so the host does not wait for the device.
        """
        tower = model.get_submodule(str(self.vision_tower))
        shown = [media[name] for name in ("pixel_values", "pixel_values_videos") if name in media]
        # Pixels are often larger than what the tower makes of them.
        pixels = shown[0] if len(shown) == 1 else torch.cat(shown)
        grids = torch.cat([media[name] for name in ("image_grid_thw", "video_grid_thw") if name in media])
        if grids.device != pixels.device:
            vision_kwargs = moved(grid_arguments(tower, grids), pixels.device) | vision_kwargs
        if self.tower_indexes_grids:
            grids = move(grids, pixels.device)
        return tower(pixels, grid_thw=grids, **vision_kwargs)

    def deep_features(self, output: Any) -> Sequence[Any]:
        """Further levels ``(F, H)`` of features in the tower's output, for decoder layers. Default: none."""
        return ()

    def deep_layers(self, config: Any) -> int:
        """After how many of the first decoder layers a level of deep features is added. Default: 0."""
        return 0

    def extras(self, features: Tensor, shape: torch.Size, spans: MediaSpans) -> dict[str, Tensor]:
        """Keywords of the decoder for the levels of ``features (F, levels, H)`` after the first, for a sequence ``(B, L)`` of
        this shape. Default: none.
        """
        return {}

    def placed_extras(self, extras: Mapping[str, Tensor], spans: MediaSpans) -> dict[str, Tensor]:
        """The `extras` of one sequence with the places of media tokens instead of a mask, which the device would have to search.
        Default: the same.
        """
        return dict(extras)

    def dense_extras(self, levels: Tensor) -> dict[str, Any]:
        """Keywords of a part of the packed decoder (a pipeline stage) for ``levels (D, L, H)``, which are added to all L tokens
        after its first D layers. Only called if `deep_layers` is above 0.
        """
        return {}

    def layer_inputs(self, model: Any, embeddings: Tensor, extras: Mapping[str, Tensor]) -> Tensor | None:
        """``(layers, L, P)``: a further vector of each token for each decoder layer, from what `merge` returns for one
        sequence. The first stage of a pipeline makes them, and sends the others theirs. Default: ``None``.
        """
        return None

    def layer_input_size(self, text: Any) -> int:
        """The size P of `layer_inputs`, by the config ``text`` of the language model. Default: 0."""
        return 0

    def layer_input_extras(self, inputs: Tensor, before: int) -> dict[str, Tensor]:
        """Keywords of a part of the decoder (a pipeline stage) for the `layer_inputs` of its layers and those after them, where
        ``before`` layers lie before it. Only called if `layer_input_size` is above 0.
        """
        return {}

    def merge(
        self, model: Any, input_ids: Tensor, features: Tensor | None, spans: MediaSpans | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Embeddings ``(B, L, H)`` of ``input_ids (B, L)`` with ``features (F, levels, H)`` placed at ``spans``, and the
        `extras`.

        ``input_ids`` may be any part of a sequence; spans state which features belong to that part, and where.
        """
        embeddings: Tensor = model.get_submodule(self.embedding)(input_ids)
        if features is None and not spans:
            return embeddings, {}
        if features is None or spans is None:
            raise MediaMismatch("media without spans, or spans without media: both come from one `distinct_media`")
        return place(embeddings, features[:, 0], spans), self.extras(features, embeddings.shape[:-1], spans)

    def decode(
        self,
        model: Any,
        embeddings: Tensor,
        position_ids: Tensor,
        extras: Mapping[str, Any] | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Hidden states ``(B, L, H)`` after the final norm, of ``embeddings (B, L, H)`` at ``position_ids (4, B, L)`` or
        ``(B, L)``.

        Keywords are passed to the language model, and a ``cache`` of transformers, which is filled in place. Without one none is
        made: with a cache packed rows are wrong.
        """
        decoder = model.get_submodule(self.language_model)
        hidden: Tensor = decoder(
            inputs_embeds=embeddings,
            position_ids=position_ids,
            use_cache=cache is not None,
            **({} if cache is None else {cache_argument(type(decoder).forward): cache}),
            **(extras or {}),
            **kwargs,
        ).last_hidden_state
        return hidden

    def lm_head(self, model: Any) -> Any:
        """The module whose weight ``(V, H)`` maps hidden states to logits."""
        return model.get_submodule(self.head)

    # Checkpoints

    def processor_files(self, config: Any) -> dict[str, dict[str, Any]]:
        """Files of a checkpoint by name, with their content as JSON, that Hugging Face's processor reads next to those of the
        tokenizer and the image processor. vLLM needs them to expand prompts. Default: none.
        """
        return {}

    def in_float32(self, name: str) -> bool:
        """Whether the parameter of this name is one of `float32_weights`."""
        return any(fnmatchcase(name, pattern) for pattern in self.float32_weights)

    def is_unused(self, name: str) -> bool:
        """Whether the weight of this name in a checkpoint is one of `unused_weights`."""
        return any(fnmatchcase(name, pattern) for pattern in self.unused_weights)

    def stored_name(self, name: str) -> str:
        """The published name of a tensor that transformers calls ``name`` in the checkpoints that it saves. Default: the same."""
        return name

    def rollout_weight(self, name: str, weight: Tensor) -> tuple[str, Tensor]:
        """A parameter under the name and in the layout of the family's checkpoints, which rollout engines load.

        Default: renamed by `checkpoint_names`.
        """
        for pattern, published in self.checkpoint_names:
            name, found = re.subn(pattern, published, name)
            if found:
                break
        return name, weight

    def rollout_weights(self, weights: Iterable[tuple[str, Tensor]], config: Any) -> Iterator[tuple[str, Tensor]]:
        """Parameters as `rollout_weight` has them. Families whose checkpoints store several as one join them.

        Default: one by one.
        """
        return (self.rollout_weight(name, weight) for name, weight in weights)

    def rollout_config(self, config: Any) -> Mapping[str, Any]:
        """Settings that vLLM needs and a checkpoint's config lacks; published configs may have them. Of a model that is a `part`,
        those of its own config. Default: none.
        """
        return {}

    def rollout_media(self, media: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        """The ``multi_modal_inputs`` of a row, under the names and in the shapes of vLLM's model. Default: the same."""
        return media


@lru_cache
def cache_argument(function: Callable[..., Any]) -> str:
    """The name by which a function of transformers takes a cache: ``past_key_values`` until 5.23, then ``cache``.

    >>> cache_argument(lambda inputs_embeds, past_key_values=None: ...), cache_argument(lambda inputs_embeds, cache=None: ...)
    ('past_key_values', 'cache')
    """
    old = "past_key_values"
    return old if old in inspect.signature(function).parameters else "cache"


def modules_like(model: Any, pattern: str | None) -> dict[str, Any]:
    """The modules whose path fits a pattern, by path; none without a pattern."""
    return {name: each for name, each in model.named_modules() if pattern is not None and fnmatchcase(name, pattern)}


def pooled(output: Any) -> Tensor:
    """Merged features ``(F, H)`` of a tower's output: a tensor, or an object with ``pooler_output`` (joined or per medium)."""
    features = output.pooler_output if hasattr(output, "pooler_output") else output
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def moved(value: Any, device: torch.device) -> Any:
    """Keywords of a tower with their tensors on ``device``, also those in tuples, as transformers 5.24 has some."""
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    return move_readable(value, device) if isinstance(value, Tensor) else value


def grid_arguments(tower: Any, grids: Tensor) -> dict[str, Any]:
    """Keywords of a Qwen-VL tower's forward that depend only on grids ``(N, 3)``, computed where the grids are.

    Positions of patches, bounds and longest length of frames and, if the tower has them, of windows, or interpolation of learned
    positions. The tower would compute them on its device and wait for it several times.
    """
    from transformers import vision_utils as hf

    merge = int(tower.spatial_merge_size)
    bounds = hf.get_vision_cu_seqlens(grids)
    found = {
        "position_ids": hf.get_vision_position_ids(grids, merge),
        "cu_seqlens": bounds,
        "max_seqlen": int(bounds.diff().max()),
    }
    if hasattr(tower, "window_size"):
        index, windows = hf.get_vision_window_index(grids, merge, tower.window_size, tower.patch_size)
        found |= {"window_index": index, "cu_window_seqlens": windows, "max_window_seqlen": int(windows.diff().max())}
    if hasattr(tower, "num_grid_per_side"):
        indices, weights = hf.get_vision_interpolation_indices_and_weights(
            grids, tower.num_grid_per_side, tower.interpolation_mode, tower.interpolation_align_corners, merge
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return found

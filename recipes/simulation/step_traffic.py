"""The bytes that a device receives in the passes of a step, by layout."""

from dataclasses import dataclass
from typing import Any

from dataproto.vlm import family_of
from dataproto.vlm.costs import attention_width, head_dim, of_layers
from recipes.simulation.cluster_shape import Cluster, Traffic
from recipes.simulation.workload import ModelParts
from workers.ranks.layout import Layout

HALF, WHOLE = 2, 4  # bytes of a number in bfloat16 and in float32


@dataclass(frozen=True)
class LayoutTraffic:
    """The traffic of a model in a layout on a cluster. Ranks are numbered by node: tp varies fastest, then sp, dp and pp."""

    cluster: Cluster
    config: Any
    parts: ModelParts
    layout: Layout

    def activations(self, tokens: float, learns: bool) -> Traffic:
        """Of the states of ``tokens`` packed tokens, those of one dp rank, in forward and, if it ``learns``, backward passes.

        - tp gathers tokens before attention and MLP, and sums and splits their results.
        - sp exchanges queries, keys, values and results of attention (Ulysses).
        - ep gathers the tokens of all its ranks, and sums and splits their results (`workers.parallel.expert`).
        - pp sends the states to the next stage, and the inputs that some families have for each later layer.
        """
        layout, text = self.layout, self.config.get_text_config()
        times, layers = 2 if learns else 1, int(text.num_hidden_layers) / layout.pp
        hidden, mine = HALF * int(text.hidden_size), tokens / layout.sp
        found = self._shared_layers(tokens, learns, layout.tp, layout.sp)
        if self.parts.experts:
            group = layout.ep * layout.tp
            found += 2 * layers * times * self.cluster.gather(group * mine / layout.tp * hidden, group)
        if layout.pp > 1:
            stride = layout.dp * layout.sp * layout.tp
            later = layers * (layout.pp - 1) * HALF * family_of(self.config).layer_input_size(text)
            found += times * self.cluster.send(mine * (hidden + later) / layout.tp, layout.pp, stride)
        return found

    def _shared_layers(self, tokens: float, learns: bool, tp: int, sp: int) -> Traffic:
        """Of these, those of tp and sp ranks."""
        text = self.config.get_text_config()
        times, layers = 2 if learns else 1, int(text.num_hidden_layers) / self.layout.pp
        hidden, mine = HALF * int(text.hidden_size), tokens / sp
        split = 2 if self.parts.experts else 4  # a mixture's experts are in the group of ep x tp
        keys = int(of_layers(text, "num_key_value_heads")) * head_dim(text)
        heads = 2 * HALF * (attention_width(text) + keys) / tp
        found = split * layers * times * self.cluster.gather(mine * hidden, tp)
        return found + layers * times * self.cluster.exchange(mine * heads, sp, tp)

    def beyond_pairs(self, tokens: float, learns: bool) -> float:
        """Seconds of `activations`, without what two ranks of tp or sp exchange, which their measured speed contains."""
        layout = self.layout
        tp, sp = min(layout.tp, 2), min(layout.sp, 2)
        exchanged = self.cluster.inside_seconds(self._shared_layers(tokens, learns, tp, sp))
        contained = exchanged * tp * sp / (layout.tp * layout.sp)
        return max(self.cluster.seconds(self.activations(tokens, learns)) - contained, 0.0)

    def gathered_weights(self, number: int = HALF) -> Traffic:
        """Of gathering all weights of a rank's part of the model once; scattering their gradients is the same."""
        layout = self.layout
        dense = self.cluster.gather(number * self.parts.dense_here(layout), layout.shards, layout.tp)
        if not self.parts.experts:
            return dense
        holders, stride = layout.shards // layout.ep, layout.tp * layout.ep
        return dense + self.cluster.gather(number * self.parts.experts_here(layout), holders, stride)

    def summed_over_replicas(self) -> Traffic:
        """Of the sum of gradients over replicas once: a ring scatters and gathers each rank's shard."""
        layout = self.layout
        shard = WHOLE * self.parts.size.on_rank(layout)
        return 2 * self.cluster.gather(shard, layout.replicas, layout.shards * layout.tp)

    def handed_over(self) -> Traffic:
        """Of giving every rank all weights for its engine: a stage gathers its own, and sends them to the other stages."""
        layout, whole = self.layout, HALF * self.parts.size.total
        found = self.cluster.gather(whole / layout.pp, layout.shards * layout.tp)
        if layout.pp > 1:
            stride = layout.dp * layout.sp * layout.tp
            found += self.cluster.exchange(whole, layout.pp, stride)
        return found

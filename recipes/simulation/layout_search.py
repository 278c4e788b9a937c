"""Choosing the layout of a cluster: the fastest that fits."""

from collections.abc import Iterator
from dataclasses import replace

from dataproto.errors import InvalidConfig
from dataproto.vlm import family_of
from recipes.simulation.cluster_shape import Cluster
from recipes.simulation.simulated_step import SimulatedStep, simulate
from recipes.simulation.workload import Choice, Workload
from workers.model.model_config import UNSHARDED, ModelConfig
from workers.ranks.layout import Layout

DEGREES = (1, 2, 4, 8, 16)


def best_step(
    workload: Workload,
    cluster: Cluster,
    compute: ModelConfig,
    layout: Layout | None = None,
    parallel: int | None = None,
) -> SimulatedStep:
    """The fastest step that fits the cluster, of one layout or of all.

    Args:
        compute: its ``activation_checkpointing`` and ``token_budget`` are kept; with ``unsharded="auto"`` the most that fits.
        parallel: devices of an engine; by default the best number.

    Raises:
        InvalidConfig: nothing fits; the message says what comes nearest, and what it needs.
    """
    layouts = [layout] if layout is not None else list(possible_layouts(workload, cluster))
    engines = [parallel] if parallel else list(engine_sizes(workload, cluster))
    best: SimulatedStep | None = None
    nearest: SimulatedStep | None = None
    for each in layouts:
        smallest = most_unsharded(workload, cluster, Choice(each, compute, max(engines)))  # in its share of an engine
        for number in engines:
            found = simulate(workload, cluster, replace(smallest.choice, engine_parallel=number))
            if found.fits and (best is None or found.seconds < best.seconds):
                best = found
            if nearest is None or found.memory < nearest.memory:
                nearest = found
    if best is not None:
        return best
    if nearest is None:
        raise InvalidConfig(f"no layout of this model has {cluster.devices} ranks: choose another number of --devices")
    why = f"{as_options(nearest.choice)}: {nearest.problems[0]}"
    raise InvalidConfig(
        f"nothing fits {cluster.devices} x {cluster.device.name}; nearest is {why}: give more --devices, a smaller "
        "--token-budget or --activation-checkpointing full"
    )


def most_unsharded(workload: Workload, cluster: Cluster, choice: Choice) -> SimulatedStep:
    """The step with the most left unsharded between micro-batches that fits, if that is open."""
    if choice.compute.unsharded != "auto":
        return simulate(workload, cluster, choice)
    for kept in reversed(UNSHARDED):
        found = simulate(workload, cluster, replace(choice, compute=replace(choice.compute, unsharded=kept)))
        if found.fits:
            break
    return found


def engine_sizes(workload: Workload, cluster: Cluster) -> Iterator[int]:
    """Devices of an engine within one node; each has whole heads."""
    heads = int(workload.config.get_text_config().num_attention_heads)
    yield from (each for each in DEGREES if each <= cluster.node and heads % each == 0 and cluster.devices % each == 0)


def possible_layouts(workload: Workload, cluster: Cluster) -> Iterator[Layout]:
    """All layouts of the cluster that the model allows, with tp within a node and replicas of whole nodes."""
    text, devices = workload.config.get_text_config(), cluster.devices
    family, mixture = family_of(workload.config), workload.parts.experts > 0
    heads, experts = int(text.num_attention_heads), family.expert_count(text) if mixture else 0
    most = int(text.num_hidden_layers) - len(family.undivided_layers(workload.config)[1:])
    stages = [each for each in DEGREES if each <= most]
    for tp in (each for each in DEGREES if each <= cluster.node):
        for sp in (each for each in DEGREES if each <= cluster.node and heads % (each * tp) == 0):
            for pp in stages:
                dp, left = divmod(devices, tp * sp * pp)
                if left or not dp:
                    continue
                for replicas in (each for each in _divisors(dp) if _is_whole(dp * sp * tp // each, each, cluster)):
                    for ep in DEGREES if mixture else (1,):
                        if (dp * sp // replicas) % ep == 0 and (not mixture or experts % (ep * tp) == 0):
                            yield Layout(dp=dp, tp=tp, pp=pp, sp=sp, ep=ep, replicas=replicas)


def _divisors(number: int) -> Iterator[int]:
    return (each for each in range(1, number + 1) if number % each == 0)


def _is_whole(ranks: int, replicas: int, cluster: Cluster) -> bool:
    """Whether a replica of so many ranks is some whole nodes; one that is all of them need not be."""
    return replicas == 1 or ranks % cluster.node == 0


def as_options(choice: Choice) -> str:
    """A choice as a recipe's command line takes it.

    >>> as_options(Choice(Layout(dp=16, replicas=2), ModelConfig(unsharded="weights"), engine_parallel=4))
    '--layout.dp 16 --layout.replicas 2 --unsharded weights --engine-options tensor_parallel 4'
    """
    parts = [f"--layout.{axis} {degree}" for axis, degree in vars(choice.layout).items() if degree > 1]
    parts.append(f"--unsharded {choice.compute.unsharded}")
    parts.append(f"--engine-options tensor_parallel {choice.engine_parallel}")
    return " ".join(parts)

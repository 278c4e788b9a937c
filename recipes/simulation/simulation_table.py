"""A simulated step as text."""

from recipes.forecast.devices import GIB
from recipes.forecast.forecast_table import count, figures
from recipes.simulation.layout_search import as_options
from recipes.simulation.simulated_step import SimulatedStep


def simulation_lines(found: SimulatedStep) -> list[str]:
    """Seconds, memory, traffic and operations by phase, and the layout as options, as lines of text."""
    cluster, workload, choice = found.cluster, found.workload, found.choice
    nodes, device = -(-cluster.devices // cluster.node), cluster.device
    lines = [
        f"simulated, not measured: {cluster.devices} x {device.name} in {nodes} {'node' if nodes == 1 else 'nodes'}, "
        f"{count(workload.parts.size.total)} parameters; {workload.prompts} prompts x {workload.batch.samples} samples, "
        f"{found.tokens:,} tokens",
        "",
        f"{'phase':16}{'seconds':>9}{'GiB':>8}{'GB within nodes':>17}{'GB between':>12}{'PFLOP':>9}{'MFU':>7}",
    ]
    for phase in found.phases:
        rate = phase.flops / phase.seconds / cluster.devices / device.peak if device.peak and phase.flops else None
        lines.append(
            f"{phase.name:16}{phase.seconds:9.2f}{phase.memory / GIB:8.1f}{phase.traffic.inside / 1e9:17,.1f}"
            f"{phase.traffic.between / 1e9:12,.1f}{figures(phase.flops / 1e15) if phase.flops else '':>9}"
            f"{'' if rate is None else format(rate, '.2f'):>7}"
        )
    rate = found.tokens / found.seconds / cluster.devices
    used = f"{found.memory / GIB:8.1f} of {device.memory / GIB:.1f} GiB, {rate:,.0f} tokens/s/device"
    lines += [
        f"{'step':16}{found.seconds:9.2f}{used}; GB are those that a device receives in a step",
        f"options: {as_options(choice)} --activation-checkpointing {choice.compute.activation_checkpointing} --token-budget "
        f"{choice.compute.token_budget}",
    ]
    return [*lines, *(f"does not fit: {problem}" for problem in found.problems)]

"""How far an engine's log-probs are from the actor's, which should be the same number for the same token."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from dataproto import DataProto

PREFIX = "training/rollout_probs_diff_"


@dataclass(frozen=True)
class Differences:
    """Statistics of |actor - engine| over the log-probs of some tokens, and of the ratio of their probabilities."""

    tokens: int
    mean: float
    p99: float
    max: float
    ratio_mean: float  # of importance ratios exp(actor - engine); 1 without a difference
    ratio_off: float  # share of tokens whose ratio is further than 0.01 from 1

    @classmethod
    def of(cls, actor: Tensor, engine: Tensor) -> "Differences":
        """Of log-probs ``(N,)``.

        >>> half = torch.tensor([0.5, 0.5]).log()
        >>> found = Differences.of(half, torch.tensor([0.5, 0.25]).log())
        >>> found.tokens, round(found.max, 4), round(found.ratio_mean, 4), found.ratio_off
        (2, 0.6931, 1.5, 0.5)
        """
        log_ratio = (actor - engine).double()
        difference, ratio = log_ratio.abs(), log_ratio.exp()
        place = max(1, round(0.99 * len(difference)))
        return cls(
            len(difference),
            float(difference.mean()),
            float(difference.kthvalue(place).values),
            float(difference.max()),
            float(ratio.mean()),
            float(((ratio - 1).abs() > 0.01).double().mean()),
        )


def differences(data: DataProto, actor: Tensor) -> dict[str, Differences]:
    """Of the column ``rollout_log_probs`` from the actor's ``(B, R)``, by kind of row: ``all``, ``text`` and ``images``; kinds
    without a token are left out.
    """
    mask = data["response_mask"].bool()
    if "multi_modal_inputs" in data:
        pictured = torch.tensor([bool(media) for media in data["multi_modal_inputs"]], dtype=torch.bool)
    else:
        pictured = torch.zeros(len(data), dtype=torch.bool)
    kinds = {"all": torch.ones(len(data), dtype=torch.bool), "text": ~pictured, "images": pictured}
    cells = {kind: mask & rows[:, None] for kind, rows in kinds.items()}
    return {
        kind: Differences.of(actor[chosen], data["rollout_log_probs"][chosen])
        for kind, chosen in cells.items()
        if chosen.any()
    }


def difference_metrics(data: DataProto, actor: Tensor) -> dict[str, float]:
    """`differences` as metrics, and under verl's names mean, maximum and standard deviation of |difference of probabilities|.

    >>> engine, actor = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.25]]).log()
    >>> data = DataProto.from_dict({"rollout_log_probs": engine, "response_mask": torch.ones(1, 2)})
    >>> found = difference_metrics(data, actor)
    >>> found["training/rollout_probs_diff_max"], round(found["training/rollout_probs_diff_text_log_max"], 4)
    (0.25, 0.6931)
    """
    mask = data["response_mask"].bool()
    probabilities = (actor[mask].double().exp() - data["rollout_log_probs"][mask].double().exp()).abs()
    if not len(probabilities):
        return {}
    metrics = {
        f"{PREFIX}mean": float(probabilities.mean()),
        f"{PREFIX}max": float(probabilities.max()),
        f"{PREFIX}std": float(probabilities.std(correction=0)),
    }
    for kind, found in differences(data, actor).items():
        metrics |= _named("" if kind == "all" else f"{kind}_", asdict(found))
    return metrics


def _named(kind: str, values: Mapping[str, float]) -> dict[str, float]:
    log = {f"{PREFIX}{kind}log_{name}": values[name] for name in ("mean", "p99", "max")}
    return log | {f"{PREFIX}{kind}{name}": values[name] for name in ("ratio_mean", "ratio_off")}

"""Losses and advantages by name: those of the library, those that users register, and ``FILE.py:FUNCTION``.

The names of a function's arguments say what it is called with: columns of the batch (`dataproto.COLUMNS`, or any other),
options of `AlgorithmConfig`, and, for a loss, ``log_probs`` and ``entropy`` of the update. A loss returns the loss of each token
``(B, R)`` and metrics of the same shape; an advantage returns ``(B, R)``, one with a critic the returns ``(B, R)`` too.

>>> def reinforce(log_probs, advantages):
...     return -advantages * log_probs, {}
>>> LOSSES.register("reinforce", reinforce, paper={"kl_coef": 0.0})
>>> "reinforce" in LOSSES.names
True
>>> LOSSES.find("reinforced")  # doctest: +ELLIPSIS
Traceback (most recent call last):
dataproto.errors.InvalidConfig: algorithm.loss='reinforced' is unknown: choose one of ppo, ..., or FILE.py:FUNCTION
>>> LOSSES.remove("reinforce")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal

from dataproto.errors import InvalidConfig
from recipes.algorithms.function_files import load_named_function

Estimator = Literal["k1", "k2", "k3", "k3+"]


VERL: Mapping[str, Any] = {
    "advantage": "grpo",
    "aggregation": "token-mean",
    "clip": (0.2, 0.2),
    "kl_coef": 0.0,
    "kl_in": "loss",
    "kl": "k3",
    "dynamic_sampling": 0,
    "overlong_buffer": 0.0,
}
"""The options that the paper of a loss or of an advantage may set, with verl's values, which stand where no paper sets one."""


GREEDY = "reward_baselines"
"""The argument of advantages that need greedy responses. Those of this project that have it say so, because a command asks for it
before it imports them.
"""


@dataclass(frozen=True)
class Algorithm:
    """A loss or an advantage.

    Attributes:
        source: the function, or for those of this package its module and name, which are imported when it is asked for: the
            names of algorithms are options, which are read without torch.
        paper: the options that its paper sets, of those in `VERL`. Options that the user sets take precedence.
        sources: further columns that the function reads, each with the function that computes it from the whole batch
            before an update.
        arguments: some of the function's arguments, so that asking for them does not import it.
        critic: of an advantage: it needs the column ``values`` of a critic, and returns the advantages and the critic's returns.
    """

    source: Callable[..., Any] | str
    paper: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    critic: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """The function; see the docstring of this module."""
        return _resolved(self.source)

    @property
    def columns(self) -> dict[str, Callable[..., Any]]:
        """The functions of the further columns."""
        return {name: _resolved(source) for name, source in self.sources.items()}

    def takes(self, name: str) -> bool:
        """Whether the function, or one that computes a column for it, has an argument ``name``."""
        if name == GREEDY and isinstance(self.source, str):
            return name in self.arguments
        return name in self.arguments or any(takes(each, name) for each in (self.function, *self.columns.values()))


def _resolved(source: Callable[..., Any] | str) -> Callable[..., Any]:
    return resolve_name(f"recipes.algorithms.{source.replace('.', ':')}") if isinstance(source, str) else source


@dataclass(frozen=True)
class Registry:
    """The losses, or the advantages, by name."""

    kind: str
    algorithms: dict[str, Algorithm]

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order of registration."""
        return tuple(self.algorithms)

    def register(
        self,
        name: str,
        function: Callable[..., Any],
        paper: Mapping[str, Any] | None = None,
        columns: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """Adds an `Algorithm` under a new name.

        Raises:
            InvalidConfig: the name is in use, or ``paper`` has an option that is not in `VERL`.
        """
        if name in self.algorithms:
            raise InvalidConfig(f"{self.kind} {name!r} is already registered: choose another name")
        if unknown := sorted(set(paper or {}) - VERL.keys()):
            raise InvalidConfig(f"{self.kind} {name!r}: paper sets {unknown}, but may only set {[*VERL]}")
        self.algorithms[name] = Algorithm(function, paper or {}, columns or {})

    def remove(self, name: str) -> None:
        """Removes a name."""
        del self.algorithms[name]

    def find(self, name: str) -> Algorithm:
        """The algorithm with this name, or the function that ``FILE.py:FUNCTION`` names.

        Raises:
            InvalidConfig: the name is unknown.
        """
        if name in self.algorithms:
            return self.algorithms[name]
        if ":" in name:
            return _from_file(name, self.kind)
        raise InvalidConfig(
            f"algorithm.{self.kind}={name!r} is unknown: choose one of {', '.join(self.algorithms)}, or FILE.py:FUNCTION"
        )


@cache
def _from_file(name: str, kind: str) -> Algorithm:
    return Algorithm(load_named_function(name, kind, InvalidConfig))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument ``name``."""
    return name in inspect.signature(function).parameters


def arguments_by_name(
    what: str, function: Callable[..., Any], columns: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The columns and the options that the arguments of a function name; arguments that are neither keep their defaults.

    Raises:
        InvalidConfig: an argument without a default is neither a column nor an option.

    >>> arguments_by_name("sum", lambda a, b, c=3: a + b + c, {"a": 1}, {"b": 2})
    {'a': 1, 'b': 2}
    """
    given, known = {}, {**options, **columns}
    for parameter in inspect.signature(function).parameters.values():
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in known:
            given[name] = known[name]
        elif parameter.default is parameter.empty:
            raise InvalidConfig(
                f"{what} has the argument {name!r}, which is neither an option nor a column of this batch; "
                f"the columns are {', '.join(sorted(columns))}"
            )
    return given


def _own(source: str, *arguments: str, critic: bool = False, sources: Any = None, **paper: Any) -> Algorithm:
    """An algorithm of this package, by module and function; the other names are those of its paper's options."""
    return Algorithm(source, paper, sources or {}, arguments, critic)


_EACH_TOKEN, _EACH_RESPONSE, _CONSTANT = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"

ADVANTAGES = Registry(
    "advantage",
    {
        "grpo": _own("advantages.group_advantage"),
        "dr_grpo": _own("advantages.dr_grpo_advantage", aggregation=_CONSTANT, kl_coef=0.0),
        "rloo": _own("advantages.leave_one_out_advantage", kl_coef=0.05, kl_in="reward"),
        "reinforce_plus_plus": _own("advantages.reinforce_plus_plus", "gamma", kl_coef=0.01, kl_in="reward"),
        "reinforce_plus_plus_baseline": _own("advantages.reinforce_plus_plus_baseline", kl_coef=0.001, kl="k2"),
        "remax": _own("advantages.greedy_baseline_advantage", GREEDY, kl_coef=0.001, kl_in="reward"),
        "opo": _own("advantages.length_weighted_advantage", kl_coef=0.0),
        "gigpo": _own("turn_advantages.gigpo_advantage", kl_coef=0.01),
        "turn_returns": _own("turn_advantages.turn_returns_advantage"),
        "gae": _own("advantages.gae", "gamma", critic=True),
        "turn_gae": _own("turn_advantages.turn_gae", critic=True),
        "bi_level_gae": _own("turn_advantages.bi_level_gae", "gamma", critic=True),
        "reverse_kl": _own("kl.reverse_kl_advantage", kl_coef=0.0),
    },
)
"""The advantages by name."""

_CLIPPED = "losses.clipped_policy_loss"
LOSSES = Registry(
    "loss",
    {
        "ppo": _own(_CLIPPED),
        "grpo": _own(_CLIPPED, aggregation=_EACH_RESPONSE, kl_coef=0.04, kl="k3", kl_in="loss"),
        "dr_grpo": _own(_CLIPPED, aggregation=_CONSTANT, advantage="dr_grpo", kl_coef=0.0),
        "dapo": _own(
            _CLIPPED,
            aggregation=_EACH_TOKEN,
            clip=(0.2, 0.28),
            kl_coef=0.0,
            dynamic_sampling=10,
            overlong_buffer=0.2,
        ),
        "gspo": _own("losses.sequence_policy_loss", aggregation=_EACH_RESPONSE, clip=(3e-4, 4e-4), kl_coef=0.0),
        "cispo": _own("losses.clipped_weight_loss", aggregation=_EACH_TOKEN, clip=(1.0, 4.0), kl_coef=0.0),
        "sapo": _own("losses.gated_policy_loss", aggregation=_EACH_RESPONSE, kl_coef=0.0),
        "clip_cov": _own(
            "losses.clip_cov_loss",
            aggregation=_EACH_TOKEN,
            clip=(1.0, 1.0),
            kl_coef=0.0,
            sources={"high_covariance": "covariances.random_high_covariance"},
        ),
        "kl_cov": _own(
            "losses.kl_cov_loss",
            aggregation=_EACH_TOKEN,
            kl_coef=0.0,
            sources={"high_covariance": "covariances.highest_covariance"},
        ),
    },
)
"""The losses by name. A loss also sets the options of its paper; see `paper_options`."""

PREFERENCES = Registry(
    "loss",
    {name: _own(f"preferences.{name}_loss") for name in ("sigmoid", "robust", "hinge", "ipo", "sigmoid_norm")}
    | {"kto": _own("preferences.kto_loss", "kl")},
)
"""The losses of preferred answers by name. One that takes ``kl`` is of answers without a partner."""


def paper_options(loss: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options in `VERL` with the values of an algorithm: those ``given``, then those of the loss, of the advantage, of verl.

    >>> paper_options("gspo", {"kl_coef": 0.1})["clip"], paper_options("gspo", {"clip": (0.2, 0.2)})["clip"]
    ((0.0003, 0.0004), (0.2, 0.2))
    """
    paper = LOSSES.find(loss).paper
    advantage = given.get("advantage") or paper.get("advantage") or VERL["advantage"]
    chosen = {**ADVANTAGES.find(advantage).paper, **paper, **given, "advantage": advantage}
    if chosen.get("kl_in") == "reward":
        chosen = {"kl": "k1"} | chosen
    return {**VERL, **chosen}

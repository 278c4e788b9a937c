"""What may be done with options by their names, and names that are none: those of other libraries, and of earlier versions."""

from pathlib import Path
from typing import Any

import yaml

_TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
COMMON, FILE_ONLY, CHANGEABLE, FREE, PLACES, FILES = (
    frozenset(_TABLE[name].split()) for name in ("common", "file_only", "changeable", "free", "places", "files")
)
"""See the comments in the file."""
OTHER_NAMES: dict[str, str] = _TABLE["other_names"]
ENDED: dict[str, str] = _TABLE["ended"]
PEER_NAMES: dict[str, str] = {name: ours for ours, names in _TABLE["peers"].items() for name in names.split()}
"""Names of options in other libraries, each with that of the option here."""


def own_name(argument: str) -> str | None:
    """What a peer's option is called here; ``None`` if it is none.

    >>> own_name("--learning-rate=1e-6"), own_name("actor_rollout_ref.rollout.n=8"), own_name("--steps")
    ('--optimizer.lr', '--algorithm.n', None)
    """
    name = argument.partition("=")[0].lstrip("-+").replace("-", "_").lower()
    for prefix in ("actor_rollout_ref.", "worker."):  # of verl's and EasyR1's names; docs/moving.md leaves it out
        name = name.removeprefix(prefix)
    return PEER_NAMES.get(name) or PEER_NAMES.get(f"{name.rpartition('.')[0]}.")

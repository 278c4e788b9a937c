"""Which versions of torch, transformers and vLLM were tested together; docs/versions.md says what was run on each."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Combination:
    """Minor versions that were tested together: ``transformers`` from the first to the last, ``None`` without vLLM."""

    torch: str
    transformers: tuple[str, str]
    vllm: str | None = None


COMBINATIONS = (
    Combination("2.13", ("5.16", "5.24")),
    Combination("2.14", ("5.24", "5.24")),
    Combination("2.11", ("5.17", "5.17"), "0.24"),
    Combination("2.13", ("5.16", "5.19"), "0.32"),
)


def tell_untested_versions(engine: str) -> None:
    """Says in one line that the versions of a start were not tested together."""
    if told := untested_versions(engine, {name: _installed(name) for name in ("torch", "transformers", "vllm")}):
        print(told)


def untested_versions(engine: str, installed: Mapping[str, str | None]) -> str | None:
    """The line for versions, by package, that no combination has; that of vLLM counts for its engine only.

    >>> untested_versions("hf", {"torch": "2.13.0+cpu", "transformers": "5.24.0", "vllm": None})
    >>> untested_versions("vllm", {"torch": "2.13.0", "transformers": "5.24.0", "vllm": "0.32.0"})
    'torch 2.13.0, transformers 5.24.0, vllm 0.32.0 were not tested together (docs/versions.md)'
    """
    names = ("torch", "transformers", *(["vllm"] if engine == "vllm" else []))
    found = {name: installed[name] for name in names}
    if None in found.values() or any(_holds(each, found) for each in COMBINATIONS):
        return None  # on a running cluster an engine may be installed elsewhere
    return f"{', '.join(f'{name} {found[name]}' for name in names)} were not tested together (docs/versions.md)"


def _holds(tested: Combination, found: Mapping[str, str | None]) -> bool:
    torch, transformers, vllm = (_minor(found.get(name)) for name in ("torch", "transformers", "vllm"))
    first, last = map(_minor, tested.transformers)
    return torch == _minor(tested.torch) and first <= transformers <= last and vllm in ((), _minor(tested.vllm))


def _minor(found: str | None) -> tuple[int, ...]:
    return tuple(map(int, found.split("+")[0].split(".")[:2])) if found else ()


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

"""Which versions of torch, transformers and vLLM were tested together; docs/versions.md says what was run on each."""

from collections.abc import Mapping
from typing import Any

from dataproto.extras import installed_version

COMBINATIONS: tuple[dict[str, tuple[str, str]], ...] = (
    {"torch": ("2.13", "2.13"), "transformers": ("5.16", "5.24")},
    {"torch": ("2.14", "2.14"), "transformers": ("5.24", "5.24")},
    {"torch": ("2.15", "2.15"), "transformers": ("5.24", "5.24")},
    {"torch": ("2.11", "2.11"), "transformers": ("5.17", "5.17"), "vllm": ("0.24", "0.24")},
    {"torch": ("2.13", "2.13"), "transformers": ("5.16", "5.19"), "vllm": ("0.32", "0.32")},
)
"""The first and the last minor version of each package that were tested together."""


def tell_untested_versions(engine: str) -> None:
    """Says in one line that the versions of a start were not tested together."""
    if told := untested_versions(engine, {name: installed_version(name) for name in ("torch", "transformers", "vllm")}):
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


def _holds(tested: Mapping[str, tuple[str, str]], found: Mapping[str, Any]) -> bool:
    return all(
        name in tested and _minor(tested[name][0]) <= _minor(version) <= _minor(tested[name][1])
        for name, version in found.items()
    )


def _minor(found: str) -> tuple[int, ...]:
    return tuple(map(int, found.split("+")[0].split(".")[:2]))

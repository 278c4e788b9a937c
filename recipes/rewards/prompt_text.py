"""What reward models see of a prompt: its text by turns, and its images."""

from collections.abc import Mapping
from typing import Any


def text_turns(prompt: Any) -> list[dict[str, str]]:
    """The turns of a `RewardRow.prompt` with their text alone.

    >>> text_turns([{"role": "user", "content": [{"type": "image", "image": ...}, {"type": "text", "text": "Find x."}]}])
    [{'role': 'user', 'content': 'Find x.'}]
    """
    return [{"role": turn["role"], "content": "".join(_texts(turn["content"]))} for turn in _turns(prompt)]


def prompt_images(prompt: Any) -> list[Any]:
    """The images of a `RewardRow.prompt`, in order."""
    parts = [part for turn in _turns(prompt) if not isinstance(turn["content"], str) for part in turn["content"]]
    return [part["image"] for part in parts if part.get("type") == "image" and part.get("image") is not None]


def _turns(prompt: Any) -> list[Mapping[str, Any]]:
    if prompt is None:
        return []
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part.get("type") == "text"]

"""Texts that end a response, for engines that sample token by token."""

from collections.abc import Sequence
from typing import Any


def completes_stop_text(tokenizer: Any, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
    """Whether the last token of a response completes one of the texts, if no token before it did.

    Texts of special tokens count. A token has at least one byte of text, so a few more tokens than the longest text has bytes are
    decoded.
    """
    length = max(len(text.encode()) for text in stop) + 4
    tail = tokenizer.decode(token_ids[-length:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return any(text in tail for text in stop)

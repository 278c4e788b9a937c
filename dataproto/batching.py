"""The names of `packing`, `collation` and `planning` under one, until all callers name the module."""

from dataproto.collation import BinLayout, collate_supervised, pack_supervised, pad_rows, ragged_rows  # noqa: F401
from dataproto.packing import PackedRows, fill_up, pack_rows, prompt_sharing, unpack_cells  # noqa: F401
from dataproto.planning import (  # noqa: F401
    balance,
    cut_minibatches,
    first_fit_decreasing,
    places_in_groups,
    split_by_budget,
    split_by_tokens,
    split_into,
)

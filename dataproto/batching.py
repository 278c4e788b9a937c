"""Batches in other forms: rows packed, parts planned, tokens collated.

One name for three modules: ``packing`` (padded rows to one sequence and back), ``balancing`` (which rows go into which
micro-batch, rank or bin) and ``collation`` (token lists to columns).
"""

from dataproto.balancing import (
    balance,
    cut_minibatches,
    first_fit_decreasing,
    split_by_budget,
    split_by_tokens,
    split_into,
)
from dataproto.packing import PackedRows, pack_rows, prompt_sharing, unpack_cells

__all__ = [
    "PackedRows",
    "balance",
    "cut_minibatches",
    "first_fit_decreasing",
    "pack_rows",
    "prompt_sharing",
    "split_by_budget",
    "split_by_tokens",
    "split_into",
    "unpack_cells",
]

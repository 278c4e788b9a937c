"""Batches in other forms: rows packed, parts planned, tokens collated.

One name for four modules: ``packing`` (padded rows to one sequence and back), ``balancing`` (which rows go into which
micro-batch, rank or bin), ``collation`` (token lists to padded columns) and ``bins`` (supervised rows side by side).
"""

from dataproto.bins import BinLayout, pack_supervised
from dataproto.collation import collate_supervised, pad_rows, ragged_rows
from dataproto.packing import PackedRows, fill_up, pack_rows, prompt_sharing, unpack_cells
from dataproto.planning import (
    balance,
    cut_minibatches,
    first_fit_decreasing,
    places_in_groups,
    split_by_budget,
    split_by_tokens,
    split_into,
)

__all__ = [
    "BinLayout",
    "PackedRows",
    "balance",
    "collate_supervised",
    "cut_minibatches",
    "fill_up",
    "first_fit_decreasing",
    "pack_rows",
    "pack_supervised",
    "pad_rows",
    "places_in_groups",
    "prompt_sharing",
    "ragged_rows",
    "split_by_budget",
    "split_by_tokens",
    "split_into",
    "unpack_cells",
]

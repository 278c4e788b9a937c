"""A batch of vision-language rows that travels between the workers of a reinforcement-learning loop."""

from dataproto._ops.column_ops import object_array
from dataproto.batching import (
    BinLayout,
    balance,
    collate_supervised,
    first_fit_decreasing,
    pack_supervised,
    split_by_budget,
    split_into,
)
from dataproto.columns import COLUMNS, require
from dataproto.distributed import all_gather, broadcast, gather, scatter
from dataproto.protocol import (
    DataProto,
    DataProtoConfig,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    pad_inert,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
    unpad_inert,
)
from dataproto.ragged import RaggedTensor
from dataproto.serialization.wire import BlobStore, shared_blobs

__all__ = [
    "COLUMNS",
    "BinLayout",
    "BlobStore",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "RaggedTensor",
    "all_gather",
    "all_gather_data_proto",
    "balance",
    "broadcast",
    "collate_fn",
    "collate_supervised",
    "first_fit_decreasing",
    "fold_batch_dim",
    "gather",
    "object_array",
    "pack_supervised",
    "pad_dataproto_to_divisor",
    "pad_inert",
    "require",
    "scatter",
    "shared_blobs",
    "split_by_budget",
    "split_into",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "unpad_inert",
]

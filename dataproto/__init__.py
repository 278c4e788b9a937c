"""`DataProto`, the batch that the workers of a reinforcement-learning loop pass to each other, and functions on it."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from dataproto.collation import collate_supervised
    from dataproto.columns import COLUMNS, require
    from dataproto.distributed import all_gather
    from dataproto.packing import pack_rows, unpack_cells
    from dataproto.planning import balance, first_fit_decreasing, split_by_tokens
    from dataproto.protocol import (
        DataProto,
        DataProtoConfig,
        DataProtoItem,
        all_gather_data_proto,
        collate_fn,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        union_numpy_dict,
        union_tensor_dict,
        unpad_dataproto,
    )
    from dataproto.ragged import RaggedTensor
    from dataproto.serialization.wire import BlobStore, shared_blobs
    from dataproto.tensordict_utils import object_array

__all__ = [
    "COLUMNS",
    "BlobStore",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "RaggedTensor",
    "all_gather",
    "all_gather_data_proto",
    "balance",
    "collate_fn",
    "collate_supervised",
    "first_fit_decreasing",
    "fold_batch_dim",
    "object_array",
    "pack_rows",
    "pad_dataproto_to_divisor",
    "require",
    "shared_blobs",
    "split_by_tokens",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpack_cells",
    "unpad_dataproto",
]

__getattr__ = lazy_names(
    __name__,
    ".collation",
    ".columns",
    ".distributed",
    ".packing",
    ".planning",
    ".protocol",
    ".ragged",
    ".serialization.wire",
    ".tensordict_utils",
)

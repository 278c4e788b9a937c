"""A batch of vision-language rows that travels between the workers of a reinforcement-learning loop."""

from dataproto.columns import COLUMNS, require
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
from dataproto.rows import object_array
from dataproto.wire import BlobStore, shared_blobs

__all__ = [
    "COLUMNS",
    "BlobStore",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "RaggedTensor",
    "all_gather_data_proto",
    "collate_fn",
    "fold_batch_dim",
    "object_array",
    "pad_dataproto_to_divisor",
    "pad_inert",
    "require",
    "shared_blobs",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "unpad_inert",
]

from .collation import collate_supervised as collate_supervised
from .columns import COLUMNS as COLUMNS, require as require
from .distributed import all_gather as all_gather
from .packing import pack_rows as pack_rows, unpack_cells as unpack_cells
from .planning import (
    balance as balance,
    first_fit_decreasing as first_fit_decreasing,
    split_by_tokens as split_by_tokens,
)
from .protocol import (
    DataProto as DataProto,
    DataProtoConfig as DataProtoConfig,
    DataProtoItem as DataProtoItem,
    all_gather_data_proto as all_gather_data_proto,
    collate_fn as collate_fn,
    fold_batch_dim as fold_batch_dim,
    pad_dataproto_to_divisor as pad_dataproto_to_divisor,
    unfold_batch_dim as unfold_batch_dim,
    union_numpy_dict as union_numpy_dict,
    union_tensor_dict as union_tensor_dict,
    unpad_dataproto as unpad_dataproto,
)
from .ragged import RaggedTensor as RaggedTensor
from .serialization.wire import BlobStore as BlobStore, shared_blobs as shared_blobs
from .tensordict_utils import object_array as object_array

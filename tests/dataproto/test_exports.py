"""What the package offers."""

import dataproto
from dataproto import protocol, tensordict_utils


def test_the_package_exports_exactly_this() -> None:
    assert sorted(dataproto.__all__) == [
        *("BlobStore", "COLUMNS", "DataProto", "DataProtoConfig", "DataProtoItem", "RaggedTensor", "all_gather"),
        *("all_gather_data_proto", "balance", "collate_fn", "collate_supervised", "first_fit_decreasing"),
        *("fold_batch_dim", "object_array", "pack_rows", "pad_dataproto_to_divisor", "require"),
        *("shared_blobs", "split_by_tokens", "unfold_batch_dim", "union_numpy_dict", "union_tensor_dict"),
        *("unpack_cells", "unpad_dataproto"),
    ]
    assert all(hasattr(dataproto, name) for name in dataproto.__all__)


def test_the_protocol_has_the_names_of_verl() -> None:
    """The names of ``verl.protocol`` 0.9.1 that its users and its own modules import, and its verbs."""
    functions = [
        *("DataProto", "DataProtoItem", "DataProtoConfig", "pad_dataproto_to_divisor", "unpad_dataproto"),
        *("union_tensor_dict", "union_numpy_dict", "fold_batch_dim", "unfold_batch_dim", "collate_fn"),
        *("serialize_single_tensor", "serialize_tensordict", "deserialize_single_tensor", "deserialize_tensordict"),
        *("all_gather_data_proto", "DataProtoFuture", "BatchData", "_padding_size_key"),
    ]
    verbs = [
        *("from_single_dict", "from_dict", "from_tensordict", "to_tensordict", "select", "select_idxs", "slice", "pop"),
        *("rename", "union", "make_iterator", "padding", "is_padding_enabled", "chunk", "split", "concat", "reorder"),
        *("repeat", "sample_level_repeat", "unfold_column_chunks", "to", "check_consistency", "print_size"),
        *("get_data_info", "save_to_disk", "load_from_disk", "__getstate__", "__setstate__"),
    ]
    assert [name for name in functions if name not in protocol.__all__] == []
    assert [name for name in verbs if not callable(getattr(protocol.DataProto, name, None))] == []
    # The value is verl's, should one process have verl's own module.
    assert protocol._padding_size_key == "_padding_size_key_x123d"
    assert callable(tensordict_utils.get_tensordict)

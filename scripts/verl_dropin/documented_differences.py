"""Differences on purpose: rows of the table in docs/dataproto.md."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import differs


def small(**facts: Any) -> Any:
    from verl import DataProto

    return DataProto.from_dict({"x": torch.arange(4)}, {"uid": np.array(list("abcd"), dtype=object)}, facts)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or the word "refused"; a mistake of this script's own is not taken for a refusal."""
    try:
        return call()
    except (ImportError, NameError):
        raise
    except Exception:
        return "refused"


def taken_or_refused(call: Callable[[], Any]) -> str:
    made = outcome(call)
    return "refused" if isinstance(made, str) and made == "refused" else "taken"


@differs(verl=[True] * 4, dataproto=[False] * 4)
def one_dict_of_facts() -> Any:
    data = small(step=1)
    made = [data[0], data[1:], data.repeat(2), data.chunk(2)[0]]
    return [each.meta_info is data.meta_info for each in made]


@differs(verl=[True, True], dataproto=[False, False])
def selection_shares_its_containers() -> Any:
    data = small()
    chosen = data.select()
    chosen.batch["y"] = torch.zeros(4)
    chosen.non_tensor_batch["z"] = np.zeros(4)
    return ["y" in data.batch, "z" in data.non_tensor_batch]


@differs(verl=["ndarray", True, (2, 2), [2, 2]], dataproto=["list", False, (4,), [2]])
def arguments_are_written() -> Any:
    from verl.protocol import DataProto, fold_batch_dim, unfold_batch_dim

    arrays, facts = {"uid": ["a"]}, {}
    DataProto.from_dict({"x": torch.zeros(1)}, arrays, facts, auto_padding=True)
    data, folded = small(), DataProto.from_dict({"x": torch.zeros(2, 2)})
    fold_batch_dim(data, 2)
    unfold_batch_dim(folded)
    return [type(arrays["uid"]).__name__, bool(facts), data.non_tensor_batch["uid"].shape, folded.batch.batch_size]


@differs(verl=[False, "object"], dataproto=[True, "int64"])
def mini_batches_in_order_are_views() -> Any:
    data = small()
    data.non_tensor_batch["n"] = np.arange(4)
    first = next(data.make_iterator(2, 1))
    return [first.batch["x"].data_ptr() == data.batch["x"].data_ptr(), str(first.non_tensor_batch["n"].dtype)]


@differs(verl=[(2, 1), (2, 3), (2, 1)], dataproto=[(2,), (2,), (2,)])
def lists_of_equal_length() -> Any:
    from verl.protocol import DataProto, collate_fn

    message = [{"role": "user", "content": "?"}]
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"messages": [message, message], "t": [np.zeros(3), np.ones(3)]})
    one = np.empty(2, dtype=object)
    one[:] = [message] * 2
    items = DataProto.from_dict({"x": torch.zeros(2)}, {"messages": one})
    collated = collate_fn([items[0], items[1]])
    arrays = [*data.non_tensor_batch.values(), collated.non_tensor_batch["messages"]]
    return [array.shape for array in arrays]


@differs(verl={"loss": [1.0, 1.0]}, dataproto={"loss": 1.0})
def padding_merges_metrics() -> Any:
    from verl.protocol import pad_dataproto_to_divisor

    return pad_dataproto_to_divisor(small(metrics={"loss": 1.0}), 3)[0].meta_info["metrics"]


@differs(verl=["refused", "refused", False], dataproto=["taken", "taken", True])
def equality_in_union() -> Any:
    from verl import DataProto

    nan = [DataProto.from_dict({"x": torch.tensor([float("nan")])}) for _ in range(2)]
    objects = [DataProto.from_dict({"x": torch.zeros(1)}, {"o": np.array([{"t": torch.ones(2)}])}) for _ in range(2)]
    left, right = small(), small()
    array = left.non_tensor_batch["uid"]
    left.union(right)
    made = [taken_or_refused(partial(two[0].union, two[1])) for two in (nan, objects)]
    return [*made, left.non_tensor_batch["uid"] is array]


@differs(verl=["refused", "refused"], dataproto=[{"gen": 2.0}, {"a": [1], "b": [2]}])
def facts_in_concat() -> Any:
    from verl import DataProto

    times = [small(timing={"gen": seconds}) for seconds in (1.0, 2.0)]
    names = [small(metrics={"a": 1}), small(metrics={"b": 2})]
    return [
        outcome(lambda: DataProto.concat(times).meta_info["timing"]),
        outcome(lambda: DataProto.concat(names).meta_info["metrics"]),
    ]


@differs(verl=["batch", "nested"], dataproto=["non_tensor_batch", "ragged"])
def nested_tensors_in_a_tensordict() -> Any:
    from tensordict import TensorDict
    from verl import DataProto

    nested = torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    data = DataProto.from_tensordict(TensorDict({"r": nested, "x": torch.zeros(2)}, batch_size=[2]))
    inside = "r" in data.batch
    return ["batch" if inside else "non_tensor_batch", "nested" if inside and data.batch["r"].is_nested else "ragged"]


@differs(verl="meta_info", dataproto="non_tensor_batch")
def an_array_of_strings_in_a_tensordict() -> Any:
    from tensordict import TensorDict
    from verl import DataProto

    data = DataProto.from_tensordict(TensorDict({"s": np.array(["a", "b"]), "x": torch.zeros(2)}, batch_size=[2]))
    return "meta_info" if "s" in data.meta_info else "non_tensor_batch"


@differs(verl=True, dataproto=False)
def deepcopy_keeps_tensors() -> Any:
    data = small()
    return data.select(deepcopy=True).batch["x"].data_ptr() == data.batch["x"].data_ptr()


@differs(verl=["bytes", True], dataproto=["tuple", False])
def pickles_and_files() -> Any:
    data = small()
    with tempfile.TemporaryDirectory() as place:
        data.save_to_disk(f"{place}/data")
        return [type(data.__getstate__()[0]).__name__, Path(f"{place}/data").read_bytes()[:1] == b"\x80"]


@differs(verl=["refused", "refused"], dataproto=[False, True])
def equality() -> Any:
    return [outcome(lambda: small() == small()), outcome(lambda: hash(small()) is not None)]


@differs(verl=["taken"] * 5, dataproto=["refused"] * 5)
def stricter() -> Any:
    from verl.protocol import DataProto, unpad_dataproto

    calls: list[Callable[[], Any]] = [
        lambda: small()[True],
        lambda: small()[[0.9]],
        lambda: unpad_dataproto(small(), 9),
        lambda: DataProto.from_dict({"x": torch.zeros(1)}, {"x": ["a"]}),
        lambda: small().union(DataProto.from_dict({"uid": torch.zeros(4)})),
    ]
    return [taken_or_refused(call) for call in calls]


@differs(verl=["refused"] * 6, dataproto=["taken"] * 6)
def more_is_accepted() -> Any:
    from verl.protocol import DataProto

    words = DataProto.from_dict(non_tensors={"word": ["a", "b"]})
    uneven = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    calls: list[Callable[[], Any]] = [
        lambda: words.union(DataProto.from_dict(non_tensors={"n": [1, 2]})),
        lambda: words.to_tensordict(),
        lambda: list(words.make_iterator(1, 1)),
        lambda: small().reorder([3, 2, 1, 0]),
        lambda: small().rename("uid", "id"),
        lambda: uneven.chunk(4),
    ]
    return [taken_or_refused(call) for call in calls]


@differs(verl=4, dataproto="mine")
def collect_function_of_a_future() -> Any:
    import ray
    from verl.protocol import DataProtoFuture

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        future = DataProtoFuture(collect_fn=lambda parts: "mine", futures=[ray.put(small())])
        made = future.get()
        return made if isinstance(made, str) else len(made)
    finally:
        ray.shutdown()

"""The bodies of the Tinker API: equal to the real SDK's, read strictly, refused by name."""

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import tinker
import torch
from google.protobuf import descriptor_pb2
from PIL import Image
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from dataproto_server.backend import PassResult, Sample, SampleResult, Snapshot, SparseRows
from dataproto_server.codec import (
    ForwardBackwardRequest,
    file_descriptor,
    read_header,
    read_pass,
    read_sample,
    write_pass_result,
    write_sample_result,
)
from dataproto_server.config import LimitsConfig
from dataproto_server.json_requests import SampleBody, parse_json, read
from dataproto_server.refusals import InvalidRequest, Refused

LIMITS = LimitsConfig()


def picture(width: int = 8, height: int = 6, kind: str = "png") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, kind)
    return file.getvalue()


def fields_of(message: descriptor_pb2.DescriptorProto) -> list:
    oneofs = [each.name for each in message.oneof_decl]
    return [
        (
            f.name,
            f.number,
            f.type,
            f.type_name,
            f.label,
            f.proto3_optional,
            oneofs[f.oneof_index] if f.HasField("oneof_index") else "",
        )
        for f in message.field
    ] + [(nested.name, nested.options.map_entry, fields_of(nested)) for nested in message.nested_type]


def test_the_messages_are_those_of_the_sdk():
    theirs = descriptor_pb2.FileDescriptorProto()
    sdk.DESCRIPTOR.CopyToProto(theirs)
    known = {message.name: fields_of(message) for message in theirs.message_type}
    for message in file_descriptor().message_type:
        expected = known[message.name]
        if message.name == "SampleResponse":
            expected = [
                field for field in expected if field[0] != "prompt_alt_tokens"
            ]  # which the server does not send
        assert fields_of(message) == expected, message.name
    enums = {enum.name: [(value.name, value.number) for value in enum.value] for enum in theirs.enum_type}
    assert {e.name: [(v.name, v.number) for v in e.value] for e in file_descriptor().enum_type} == enums


def sdk_body(data: list[tinker.Datum], loss: str = "ppo", config=None) -> bytes:
    given = tinker.types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    request = tinker.types.ForwardBackwardRequest(forward_backward_input=given, model_id="s:train:0", seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def test_a_pass_of_the_sdk_is_read_as_it_was_given():
    chunks = [
        tinker.EncodedTextChunk(tokens=[1, 2]),
        tinker.types.ImageChunk(data=picture(), format="png", expected_tokens=4),
    ]
    inputs = {"target_tokens": [5, 6, 7, 8, 9, 10], "weights": np.array([0.5] * 6, np.float32)}
    body = sdk_body(
        [tinker.Datum(model_input=tinker.ModelInput(chunks=chunks), loss_fn_inputs=inputs)],
        config={"beta": 0.5, "mode": "x"},
    )
    found = read_pass(body, LIMITS)
    assert (read_header(body).model_id, read_header(body).seq_id) == ("s:train:0", 3)
    assert (found.model_id, found.loss, found.loss_config, found.forward_only) == (
        "s:train:0",
        "ppo",
        {"beta": 0.5, "mode": "x"},
        False,
    )
    (datum,) = found.data
    assert datum.chunks[0].ids().tolist() == [1, 2]
    assert (datum.chunks[1].data, datum.chunks[1].format, datum.chunks[1].expected_tokens) == (picture(), "png", 4)
    assert datum.inputs["target_tokens"].tolist() == [5, 6, 7, 8, 9, 10]
    assert datum.inputs["weights"].dtype == np.float32


def test_sparse_targets_of_the_sdk_stay_sparse_and_dense_ones_dense():
    targets = torch.zeros(6, 50, dtype=torch.int64)
    targets[2, 7], targets[5, 0] = 9, 4
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints([1] * 6), loss_fn_inputs={"target_tokens": targets})
    found = read_pass(sdk_body([datum]), LIMITS).data[0].inputs["target_tokens"]
    assert isinstance(found, SparseRows)
    dense = np.zeros(found.shape, np.int64)
    for row in range(6):
        place = slice(found.crow_indices[row], found.crow_indices[row + 1])
        dense[row, found.col_indices[place]] = found.values[place]
    assert (dense == targets.numpy()).all()
    assert (found.padded(-1)[found.listed] == found.values).all()


def test_results_of_a_pass_reach_the_sdk_one_and_two_dimensional():
    outputs = [
        {"logprobs": np.array(values, np.float32)} for values in ([-1.0, -2.0], [-3.0], [[-1.0, -2.0], [-3.0, -4.0]])
    ]
    found = deserialize_forward_backward_output(write_pass_result(PassResult(outputs, {"loss:sum": 2.5})))
    assert found.metrics == {"loss:sum": 2.5}
    assert [each["logprobs"].tolist() for each in found.loss_fn_outputs] == [
        [-1.0, -2.0],
        [-3.0],
        [[-1.0, -2.0], [-3.0, -4.0]],
    ]


def asked(**changes) -> SampleBody:
    prompt = tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1, 2, 3])])
    request = tinker.types.SampleRequest(
        sampling_session_id="s", seq_id=1, prompt=prompt, sampling_params=tinker.SamplingParams(stop=[])
    )
    given = json.loads(request.model_dump_json(exclude_none=True))
    return read(SampleBody, given | changes)


def test_a_request_for_samples_of_the_sdk_is_read_with_no_stop_kept_apart_from_the_default_one():
    assert read_sample(asked(), "r", Snapshot("k"), LIMITS).sampling.stop == []
    sampling = {"temperature": 0, "max_tokens": 3}
    found = read_sample(asked(sampling_params=sampling, num_samples=2), "r", Snapshot("k"), LIMITS)
    assert (found.sampling.stop, found.sampling.max_tokens, found.num_samples, found.snapshot.base_model) == (
        None,
        3,
        2,
        "k",
    )
    image = {"type": "image", "data": base64.b64encode(picture(kind="jpeg")).decode(), "format": "jpeg"}
    found = read_sample(
        asked(prompt={"chunks": [{"type": "encoded_text", "tokens": [1]}, image]}), "r", Snapshot("k"), LIMITS
    )
    assert found.chunks[1].data == picture(kind="jpeg")


def test_samples_reach_the_sdk_with_sparse_targets_in_their_layout():
    targets = {
        "data": [7, 8, 9],
        "dtype": "int64",
        "shape": [2, 6],
        "sparse_crow_indices": [0, 1, 3],
        "sparse_col_indices": [5, 0, 2],
    }
    request = read_sample(asked(target_prompt_logprobs=targets), "r", Snapshot("k"), LIMITS)
    assert request.target_prompt_logprobs.padded(-1).tolist() == [[7, -1], [8, 9]]
    sample = Sample(
        np.array([4, 5], np.int32),
        np.array([-0.5, -1], np.float32),
        "stop",
        (np.array([[4], [5]]), np.array([[-0.5], [-1.0]])),
    )
    prompt = np.array([np.nan, -1, -2], np.float32)
    scored = replace(request.target_prompt_logprobs, values=np.array([-7.0, -8.0, -9.0], np.float32))
    result = SampleResult([sample], prompt, (np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)), scored)
    found = deserialize_sample_response(write_sample_result(result))
    (sequence,) = found.sequences
    assert (sequence.tokens, sequence.logprobs, sequence.stop_reason) == ([4, 5], [-0.5, -1.0], "stop")
    assert found.prompt_logprobs == [None, -1.0, -2.0]
    assert np.asarray(found.target_prompt_logprobs.data).tolist() == [-7.0, -8.0, -9.0]
    assert found.target_prompt_logprobs.sparse_col_indices == [5, 0, 2]


def broken_pass(change) -> bytes:
    message = ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="ppo")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = np.zeros(4, np.float32).tobytes(), 1
    tensor.shape.extend([4])
    change(message, datum, tensor)
    return message.SerializeToString()


def huge_shape(message, datum, tensor):
    del tensor.shape[:]
    tensor.shape.extend([10**12, 10**12])


def bad_csr(message, datum, tensor):
    tensor.sparse_csr.values = np.zeros(2, np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 2], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.array([0, 9], np.int64).tobytes()
    del tensor.shape[:]
    tensor.shape.extend([2, 3])


def bad_image(message, datum, tensor):
    image = datum.model_input.add().image
    image.data, image.format = b"\x89PNG\r\n\x1a\nbroken", "png"


def many_images(message, datum, tensor):
    for _ in range(65):
        image = datum.model_input.add().image
        image.data, image.format = picture(), "png"


def large_image(message, datum, tensor):
    image = datum.model_input.add().image
    image.data, image.format = picture(5000, 5000), "png"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (huge_shape, "datum 0: shape .* does not hold 4 values"),
        (bad_csr, "col_indices must be 2 numbers from 0 to 2"),
        (bad_image, "image 0 is no readable png file"),
        (many_images, "65 images in a request: at most 64 .--max-images"),
        (large_image, "5000 x 5000 pixels: at most 20.0 million .--max-image-megapixels"),
        (lambda m, d, t: setattr(t, "dense", b"abc"), "3 bytes are no whole number of values of 4 bytes"),
        (lambda m, d, t: setattr(t, "dtype", 99), "dtype 99 is unknown"),
        (lambda m, d, t: setattr(d.model_input.add().dmel, "dmel", b"x"), "type dmel is not supported"),
        (lambda m, d, t: m.data.pop(), "at least one datum"),
        (lambda m, d, t: d.model_input.pop(), "its input is empty"),
    ],
)
def test_a_broken_pass_is_refused_by_name(change, told):
    with pytest.raises(InvalidRequest, match=told):
        read_pass(broken_pass(change), LIMITS)


@pytest.mark.parametrize("body", [rb'{"a": "\ud800"}', rb'{"\uDfff": 1}', b'{"a": "\xed\xa0\x80"}'])
def test_text_that_no_file_can_hold_is_refused(body):
    with pytest.raises(Refused, match="no JSON") as refused:
        parse_json(body)
    assert refused.value.status == 400


def test_a_whole_surrogate_pair_is_text():
    assert parse_json(rb'{"a": "\ud83d\ude00 \\ud800"}') == {"a": "\U0001f600 \\ud800"}


def sparse_targets(counts: list[int]) -> dict:
    """Rows of so many tokens, in sparse form."""
    crow = [0, *np.cumsum(counts).tolist()]
    columns = [column for count in counts for column in range(count)]
    layout = {"sparse_crow_indices": crow, "sparse_col_indices": columns, "shape": [len(counts), 1000]}
    return {"data": [1] * len(columns), "dtype": "int64"} | layout


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_samples": 10**9}, "num_samples=1000000000: must be from 1 to 1024 .--max-samples"),
        ({"prompt": {"chunks": []}}, "the prompt is empty"),
        (
            {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "http://x", "format": "png"}]}},
            "chunk 0 is of type",
        ),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1.5]}]}},
            "chunk 0 .encoded_text.: Expected `int`, got `float`",
        ),
        ({"prompt": {"chunks": [7]}}, "chunk 0 is of type 'int'"),
        (
            {"prompt": {"chunks": [{"type": "image", "data": "AAAA", "format": ["png"]}]}},
            "chunk 0 .image.: Expected `str`, got `array`",
        ),
        ({"prompt": {"chunks": [{"type": "image", "data": "\u00e9", "format": "png"}]}}, r"chunk 0 \(image\): "),
        ({"sampling_params": {"top_p": 0}}, "top_p=0.0"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature=nan"),
        ({"sampling_params": {"temperature": 1e-40}}, "temperature=1e-40: must be 0, .* or at least 1e-30"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "int64 array .prompt - 1, K."),
        (
            {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 60_001}]},
                "target_prompt_logprobs": sparse_targets([100] + [0] * 59_999),
            },
            "60000 rows of up to 100 tokens: at most 4194304 in all",
        ),
        ({"topk_prompt_logprobs": 65}, "must be from 0 to 64 .--max-topk"),
    ],
)
def test_a_broken_request_for_samples_is_refused_by_name(changes, told):
    with pytest.raises(InvalidRequest, match=told):
        read_sample(asked(**changes), "r", Snapshot("k"), LIMITS)


def test_json_is_read_strictly():
    with pytest.raises(InvalidRequest, match="unknown field `beam_width`"):
        asked(beam_width=3)
    with pytest.raises(InvalidRequest, match=r"Expected `int`, got `float` - at `\$.sampling_params.top_k`"):
        asked(sampling_params={"top_k": 1.5})
    with pytest.raises(InvalidRequest, match="missing required field `seq_id`"):
        read(SampleBody, {"sampling_session_id": "s", "prompt": {"chunks": []}, "sampling_params": {}})
    with pytest.raises(InvalidRequest, match=r"out of range - at `\$.sampling_params.temperature`"):
        asked(sampling_params={"temperature": 10**400})  # no float
    for body in (b"[]", b"{", b"\xff", b"[" * 100_000):
        with pytest.raises(Refused):
            parse_json(body)
    with pytest.raises(Refused, match="no ForwardBackwardRequest"):
        read_header(b"\x0a\xff")

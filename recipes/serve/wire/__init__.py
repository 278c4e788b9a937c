"""The bodies of the Tinker API: protobuf and JSON to plain data, and back; all of them are checked."""

from recipes.serve.wire.json_requests import parse_json, read
from recipes.serve.wire.pass_codec import UNTOLD_IMAGE_TOKENS, PassHeader, read_header, read_pass, write_pass_result
from recipes.serve.wire.sample_codec import SampleCall, read_sample, write_sample_result

__all__ = [
    "UNTOLD_IMAGE_TOKENS",
    "PassHeader",
    "SampleCall",
    "parse_json",
    "read",
    "read_header",
    "read_pass",
    "read_sample",
    "write_pass_result",
    "write_sample_result",
]

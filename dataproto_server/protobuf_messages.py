"""The protobuf messages of the Tinker API (``tinker_public.textproto``), in a descriptor pool of their own.

protobuf's default pool refuses a second file with the same names: there this module would not load after the ``tinker`` package.
"""

from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """The messages as protobuf describes a file of them."""
    text = Path(__file__).with_name("tinker_public.textproto").read_text(encoding="utf-8")
    file: descriptor_pb2.FileDescriptorProto = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(file_descriptor())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"tinker_public.{name}"))


ForwardBackwardRequest = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
Tensor = _message("Tensor")

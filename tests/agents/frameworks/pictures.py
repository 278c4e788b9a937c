"""The task of an agent, and the pictures that its tool shows."""

import base64
import json
import struct
import sys
import zlib

SIDE = 56


def png(red):
    """A picture of one colour, as the bytes of a file."""
    rows = (b"\0" + bytes((red, 30, 40)) * SIDE) * SIDE
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


PICTURES = [png(red) for red in (80, 120, 160, 200)]
"""One for each look."""
URIS = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in PICTURES]


def question():
    """What the agent is asked, of the task on its standard input."""
    content = json.load(sys.stdin)["messages"][0]["content"]
    return content if isinstance(content, str) else content[0]["text"]


def finish(answer, looks):
    """Tells the reward."""
    print(json.dumps({"score": float("red" in str(answer)), "looks": looks}))

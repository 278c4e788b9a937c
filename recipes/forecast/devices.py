"""Devices by name: what their data sheets say, and which part of it a training step reaches."""

from dataclasses import dataclass

from dataproto.errors import InvalidConfig

GIB = 2**30


@dataclass(frozen=True)
class Overheads:
    """Seconds of starting operations, which count where a model is small; measured by `calibrate_cpu`, 0 where they do not."""

    decoded_row: float = 0.0  # of each row in a decoding step, its operations included; 0: by its operations
    decoded_key: float = 0.0  # of each token in the cache of such a row
    learning: float = 0.0  # of a forward and a backward pass
    scoring: float = 0.0  # of a pass without gradients
    optimizer: float = 0.0  # of an optimizer step
    scoring_rate: float = 1.0  # operations per second of passes without gradients, as a multiple of those with
    preparation: float = 0.0  # of a prompt, to read and prepare it; 0 where other processes do


@dataclass(frozen=True)
class Device:
    """A device, and the speed of this project's kernels on it.

    Operations per second are those of forward and backward pass together, of the operations that a step requires.
    """

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes per second, of its memory
    language: float  # operations per second in the products of decoder layers and head
    vision: float  # operations per second in the tower
    link: float = 0.0  # bytes per second between devices, of those that computation does not hide
    decode_overhead: float = 0.0  # seconds of the host for a decoding step, on a CPU
    launch: float = 0.0  # seconds of the host to start an operation, while the device computes; 0: see ``overheads``
    attention: float = (
        0.0  # operations per second between queries and keys; 0: ``language`` is that of the whole decoder
    )
    peak: float | None = None  # dense bfloat16 operations per second
    host: float | None = None  # `host_pace` of its host; None: not measured, counts as 1
    on_cpu: bool = False
    context: int = 0  # bytes that the driver and its libraries take; on a CPU the interpreter and its libraries
    overheads: Overheads = Overheads()

    @property
    def bytes_of_number(self) -> int:
        """Bytes of a number in activations: float32 on a CPU, bfloat16 elsewhere."""
        return 4 if self.on_cpu else 2


LAUNCH = 47e-6
"""Seconds of the host for an operation: Python, autograd and the driver. Log-probs of a model of 135 M in one micro-batch, about
1,700 operations (`recipes.forecast.step_time`), took 0.08 s on the host of an H200 (benchmarks/RESULTS.md).
"""


PRODUCTS, ATTENTION, TOWER = 0.74, 0.22, 0.44
"""What an H200 reaches of its peak in products of compiled layers, in torch's attention, and in the tower as a whole; forward and
backward pass together (docs/performance.md, "Time by kind of kernel").
"""


def accelerator(name: str, memory: int, bandwidth: float, peak: float, link: float) -> Device:
    """A GPU that reaches what an H200 does of its peak."""
    return Device(
        *(name, memory, bandwidth, PRODUCTS * peak, TOWER * peak, link),
        launch=LAUNCH,
        attention=ATTENTION * peak,
        peak=peak,
        context=GIB,
    )


DEVICES = {
    "h200": accelerator("h200", 150_754_820_096, 4.8e12, 989e12, 250e9),
    "h100": accelerator("h100", 85_520_809_984, 3.35e12, 989e12, 250e9),
    "a100-80g": accelerator("a100-80g", 85_095_874_560, 2.04e12, 312e12, 170e9),
}
EAGER = 0.85  # speed of layers that are not compiled, beside compiled ones
SHARED = {"tp": 0.67, "sp": 0.64}
"""Speed with two ranks beside data parallelism on as many devices, their traffic counted: 7B on H200 with dp 2 x tp 2, and with
sp 2 (benchmarks/RESULTS.md). Higher degrees have not been measured.
"""


def device_named(name: str) -> Device:
    """The device of the table.

    Raises:
        InvalidConfig: the table does not have it.
    """
    if name not in DEVICES:
        raise InvalidConfig(f"device={name!r} is unknown: choose one of {', '.join([*DEVICES, 'cpu'])}")
    return DEVICES[name]

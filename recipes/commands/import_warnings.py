"""What libraries warn of while a command imports them, and no user can act on.

transformers imports torchao wherever it is installed. Without CUDA torchao says of each of its CUDA libraries that it cannot be
loaded, and torch says of two of torchao's classes that torchao registers them needlessly. All else that they log stays, also
what torchao cannot load beside a torch for CUDA.
"""

import logging
import sys

__all__ = ["silence"]

TORCHAO_ENUMS = ("<enum 'KernelPreference'>", "<enum 'ScaleCalculationMode'>")


def silence() -> None:
    """Leaves these warnings out from now on. It imports no library."""
    logging.getLogger("torchao").addFilter(_of_use)
    logging.getLogger("torch.utils._pytree").addFilter(_of_use)


def _of_use(record: logging.LogRecord) -> bool:
    if record.levelno > logging.WARNING:
        return True
    text = record.getMessage()
    if record.name == "torchao":
        return not (text.startswith("Failed to load ") and ".so" in text and _without_cuda())
    return not (text.startswith(TORCHAO_ENUMS) and "is an Enum subclass" in text)


def _without_cuda() -> bool:
    """Whether the torch that is loaded is built without CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.version.cuda is None and getattr(torch.version, "hip", None) is None

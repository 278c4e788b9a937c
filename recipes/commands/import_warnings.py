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
    text, built = record.getMessage(), getattr(sys.modules.get("torch"), "version", None)
    if record.name == "torchao":
        without_cuda = built is not None and built.cuda is None and getattr(built, "hip", None) is None
        return not (text.startswith("Failed to load ") and ".so" in text and without_cuda)
    return not (text.startswith(TORCHAO_ENUMS) and "is an Enum subclass" in text)

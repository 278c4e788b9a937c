"""A limit of file sizes, which stands for a full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size):
    """Lets this process write files of ``size`` bytes; Python ignores the signal, so that a write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

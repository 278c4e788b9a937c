"""vLLM's second model runner on a CPU: Triton's interpreter runs its kernels where Triton has no backend for the CPU.

    TRITON_INTERPRET=1 python -m pytest tests/rollout/test_vllm_engine.py

vLLM asks for a backend by name; the interpreter needs none.
"""

import os


class _Driver:
    @staticmethod
    def is_active():
        return True


def interpreted():
    """Whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def register():
    """Has vLLM, when it is imported, find a backend of Triton for the CPU, if kernels run in the interpreter."""
    if interpreted():
        from triton.backends import Backend, backends

        backends.setdefault("cpu", Backend(compiler=None, driver=_Driver))

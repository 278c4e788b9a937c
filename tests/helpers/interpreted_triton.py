"""vLLM's second model runner on a CPU: Triton's interpreter runs its kernels where Triton has no backend for the CPU.

    TRITON_INTERPRET=1 python -m pytest tests/rollout/test_vllm_engine.py

vLLM asks for a backend by name; the interpreter needs none. Inductor would ask that backend for its target, so it is told before
that Triton compiles for no device here. The interpreter has no arithmetic in bfloat16, see `plain_places`.
"""

import inspect
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
        from torch.utils._triton import has_triton
        from triton.backends import Backend, backends

        has_triton()  # which is kept
        backends.setdefault("cpu", Backend(compiler=None, driver=_Driver))


def plain_places(monkeypatch):
    """Has Qwen3-VL's vision tower in bfloat16 interpolate its positions by torch, if kernels run in the interpreter.

    Triton's documents list it among the limits of the interpreter: it keeps bfloat16 as integers of 16 bits and multiplies those,
    so that vLLM's kernel gives NaN.
    """
    if interpreted():
        from vllm.model_executor.models import qwen3_vl

        monkeypatch.setattr(qwen3_vl, "triton_pos_embed_interpolate", qwen3_vl.pos_embed_interpolate_native)


def schedule_ahead(monkeypatch):
    """Has vLLM's platform CPU leave the scheduling of steps ahead of the tokens of the last one as it would be on CUDA."""
    from vllm.platforms import current_platform

    own = current_platform.check_and_update_config

    def check(config):
        asked = config.scheduler_config.async_scheduling
        own(config)
        config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(current_platform, "check_and_update_config", check)


def rows_may_read_fewer_tokens(monkeypatch):
    """Mends vLLM's function for recurrent layers on a CPU, which ends where a row reads fewer tokens than counted in its step
    before (`findings/vllm_cpu_drafts_of_unequal_length.sh`). Its kernels for CUDA take such rows.

    Of the window of the short convolution it keeps as much as the new tokens leave room for, not what the convolution needs.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    source, parts = inspect.getsource(gdn_attention._spec_forward), dict[str, object]()
    for own, mended in {
        "B[:, offset + 1 : offset + 1 + (state_len - q_i)]": "B[:, offset + 1 : offset + width - 1].clone()",
        "B.copy_(new_B)": "B[:, : new_B.shape[1]].copy_(new_B)",
    }.items():
        assert own in source, "vLLM has changed this function: is it mended?"
        source = source.replace(own, mended)
    exec(source, vars(gdn_attention), parts)
    monkeypatch.setattr(gdn_attention, "_spec_forward", parts["_spec_forward"])

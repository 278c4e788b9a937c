"""Shares of a device's time, from traces made by hand, and from one that the profiler wrote."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from benchmarks.trace_summary import device_time, length, read_trace, time_table
from helpers.examples import at_most

ROOT = Path(__file__).parents[2]


def event(name, start, end, category="kernel", **more):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start} | more


STEP = [
    event("ampere_bf16_gemm", 100, 400),
    event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 300, 600),  # 400 to 600 alone
    event("flash_fwd_kernel", 600, 900),
    event("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 850, 1000),  # 900 to 1000 alone
    event("ncclDevKernel_AllGather_RING_LL", 950, 1050),  # 1000 to 1050 beside no other collective
    event("Memcpy HtoD (Pinned -> Device)", 1040, 1070, "gpu_memcpy"),  # 1050 to 1070 alone
    event("cudaLaunchKernel", 0, 5000, "cuda_runtime"),  # of the host
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 0},
    event("ampere_bf16_gemm", 1100, 1200),
]


def test_shares_of_a_trace_made_by_hand():
    found = device_time(STEP)
    micro = {
        name: round(getattr(found, name) * 1e6) for name in ("step", "compute", "communication", "exposed", "copies")
    }
    assert micro == {"step": 1100, "compute": 700, "communication": 500, "exposed": 350, "copies": 20}
    assert round(found.idle * 1e6) == 30  # 1070 to 1100
    assert {kind: tuple(round(each * 1e6) for each in pair) for kind, pair in found.kinds.items()} == {
        "AllGather": (400, 300),
        "ReduceScatter": (150, 100),
    }


def test_time_of_the_host_before_the_first_kernel_is_idle():
    assert round(device_time(STEP, seconds=0.002).idle * 1e6) == 930


def test_a_trace_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernels"):
        device_time([event("cudaLaunchKernel", 0, 1, "cuda_runtime")])


@settings(max_examples=at_most(50))
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9), st.booleans()), min_size=1))
def test_shares_are_those_of_a_count_of_microseconds(kernels):
    trace = [event("ncclKernel" if nccl else "gemm", start, start + size) for start, size, nccl in kernels]
    found = device_time(trace)
    computes, communicates = (
        {at for start, size, nccl in kernels if nccl == which for at in range(start, start + size)}
        for which in (False, True)
    )
    assert round(found.compute * 1e6) == len(computes)
    assert round(found.communication * 1e6) == len(communicates)
    assert round(found.exposed * 1e6) == len(communicates - computes)
    assert round(length((start, start + size) for start, size, _ in kernels)) == len(computes | communicates)


def test_a_table_of_files_has_a_row_each(tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": STEP}))
    (tmp_path / "rank1.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": STEP[:3]}).encode()))
    command = [sys.executable, str(ROOT / "benchmarks" / "trace_summary.py"), *map(str, sorted(tmp_path.iterdir()))]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[2:]
    assert rows[0] == (
        "| rank0.json | 0.001 | 63.6% | 45.5% | 31.8% | 1.8% | 2.7% | AllGather 0.3 of 0.4, ReduceScatter 0.1 of 0.1 |"
    )
    assert rows[1].startswith("| rank1.json.gz | 0.001 | 75.0% | 37.5% | 25.0% | 0.0% | 0.0% |")
    assert time_table([("rank0.json", device_time(STEP))]).splitlines()[2] == rows[0]


def test_files_of_the_profiler_are_read(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(4).sum()
    recorded.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    names = {each.get("name") for each in read_trace(tmp_path / "trace.json.gz")}
    assert "aten::sum" in names

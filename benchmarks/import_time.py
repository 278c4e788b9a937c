"""How long importing all names of ``dataproto`` takes on top of torch and tensordict: ``python benchmarks/import_time.py``."""

import subprocess
import sys

PROGRAM = """
import time
import torch, tensordict
start = time.perf_counter()
from dataproto import *
print(1000 * (time.perf_counter() - start))
"""

if __name__ == "__main__":
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True) for _ in range(5)
    ]
    times = sorted(float(run.stdout) for run in runs)
    print(
        f"from dataproto import * adds {times[2]:.0f} ms to torch and tensordict (median of 5; {times[0]:.0f} to {times[-1]:.0f})"
    )

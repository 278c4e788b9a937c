"""How fast this host runs Python like vLLM's, beside the reference host of the forecasts: ``python benchmarks/host_speed.py``.

Needs the standard library, NumPy and the repository; no GPU. A host whose vLLM has been measured may become the
reference: its seconds are `STEP` and `ROW`, and the first line here is `REFERENCE`, all in `recipes/forecast/host_pace.py`.
``benchmarks/rollout.py --side ours --requests 32`` and ``--requests 640`` print the milliseconds of a decoding step with so many
rows; where the device is faster than the host, the first is about `STEP`, and the second, divided by its rows, `ROW`.
"""

import platform
import runpy
from pathlib import Path
from statistics import median
from typing import Any

MODULE = Path(__file__).resolve().parents[1] / "recipes" / "forecast" / "host_pace.py"
ROUNDS = 5
ROWS = (1, 64, 256, 320, 640)


def lines(module: dict[str, Any], rounds: int = ROUNDS) -> list[str]:
    """The calibration several times, what the forecasts take for it, and the decoding steps that follow.

    Args:
        module: the names of ``recipes/forecast/host_pace.py``.
    """
    seconds = [module["work_seconds"]() for _ in range(rounds)]
    pace = median(seconds) / module["REFERENCE"]
    found = [
        f"calibration: {1e3 * median(seconds):.2f} ms ({1e3 * min(seconds):.2f} to {1e3 * max(seconds):.2f} in {rounds} rounds), "
        f"Python {platform.python_version()}, {processor()}",
        f"pace: {pace:.2f} of the time of the reference host ({1e3 * module['REFERENCE']:.2f} ms)",
    ]
    for rows in ROWS:
        found.append(
            f"host of a decoding step with {rows} rows: {1e3 * module['decoding_step'](rows, pace):.2f} ms forecast"
        )
    return found


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """The name of this host's processor."""
    lines = file.read_text().splitlines() if file.is_file() else []  # Linux has it
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    print("\n".join(lines(runpy.run_path(str(MODULE)))))

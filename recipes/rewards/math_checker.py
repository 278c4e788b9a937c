"""The process in which answers are compared: ``python math_checker.py SECONDS BYTES``, started by `checking`.

Reads one JSON line ``[answer, truth]`` at a time and writes one byte, ``1`` or ``0``; ``r`` first, when it is ready. Sympy
may hang or eat memory on what it is given, so this process has limits of its own and may be killed at any time. Imports
nothing of this project, so that it starts fast.
"""

import json
import math
import os
import resource
import sys
import time


def serve(seconds: float, memory: int) -> None:
    """Answers until standard input ends. ``seconds`` of CPU time an answer, ``memory`` bytes in all."""
    from mathruler.grader import grade_answer

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whatever an evaluated expression prints
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    os.write(verdicts, b"r")
    for line in sys.stdin.buffer:
        # A backstop for when nobody is left to kill this process while it hangs.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, most))
        try:
            equal = grade_answer(*json.loads(line))
        except Exception:
            equal = False
        os.write(verdicts, b"1" if equal else b"0")


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))

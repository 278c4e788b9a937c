"""The process that compares answers: ``python _grading_process.py SECONDS BYTES``. `recipes.rewards.checking` starts it.

It writes the byte ``r`` when it is ready. Then it reads JSON lines ``[answer, truth]`` and answers each with a byte, ``1`` or
``0``. Because sympy may hang or exhaust memory, the process limits itself and may be killed at any time. It is a file of its
own and imports nothing of this project, so that it starts fast.
"""

import json
import math
import os
import resource
import sys
import time


def serve(seconds: float, memory: int) -> None:
    """Compares answers until standard input ends, with limits of ``seconds`` of CPU time for each and ``memory`` bytes."""
    from mathruler.grader import grade_answer

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # discard what evaluated expressions print
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory if most == resource.RLIM_INFINITY else min(memory, most), most))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    os.write(verdicts, b"r")
    for line in sys.stdin.buffer:
        # The parent kills a process that hangs; this limit ends it if the parent is gone.
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds) + 1, most))
        try:
            equal = grade_answer(*json.loads(line))
        except Exception:
            equal = False
        os.write(verdicts, b"1" if equal else b"0")


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]))

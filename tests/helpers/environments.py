"""Environments for processes of their own: this module imports little."""

import os
import signal
import sys
import time

import numpy as np
from PIL import Image

from rollout.environments.environment import Observation

GIB = 1 << 30


class Drawing:
    """Shows pictures of random colours, and ends by chance."""

    def reset(self, row, seed):
        self.rng = np.random.default_rng(seed)
        return Observation(["go", self.drawn()])

    def step(self, action):
        return Observation([self.drawn(), action[:0]], float(self.rng.integers(3)), bool(self.rng.random() < 0.3))

    def drawn(self):
        return Image.new("RGB", (16, 24), tuple(self.rng.integers(0, 255, 3).tolist()))


class Leaving:
    """Ends its process."""

    def reset(self, row, seed):
        os._exit(4)

    def step(self, action):
        raise NotImplementedError


class Misbehaving:
    """What it does in its second step is the number that is the seed of the episode."""

    def reset(self, row, seed):
        self.seed, self.steps = seed, 0
        return Observation(["go"])

    def step(self, action):
        self.steps += 1
        return Observation(["on"], reward=0.5) if self.steps < 2 else getattr(self, f"step_{self.seed}")()

    def step_0(self):
        return Observation(done=True, reward=1.0, info={"bytes": np.int64(self.steps), "object": lambda: 0})

    def step_1(self):
        return Observation([bytearray(GIB) and "too much"])

    def step_2(self):
        return Observation([str(len([bytearray(1 << 20) for _ in range(1024)]))])

    def step_3(self):
        return Observation([str(np.ones((1 << 14, 1 << 14)).sum())])

    def step_4(self):
        try:
            bytearray(GIB)
        except MemoryError:
            return Observation(done=True, reward=2.0)

    def step_5(self):
        os.kill(os.getpid(), signal.SIGABRT)

    def step_6(self):
        sys.exit(3)

    def step_7(self):
        os._exit(4)

    def step_8(self):
        return "text"

    def step_9(self):
        raise KeyError("no map")


class Hanging:
    async def reset(self, row, seed):
        return Observation([str(os.getpid())])

    def step(self, action):
        time.sleep(1000)

    def close(self):
        raise AssertionError("nobody can tell")


class Greedy(Drawing):
    def step(self, action):
        raise MemoryError("array")


class Slow:
    def reset(self, row, seed):
        return Observation(["go"])

    def step(self, action):
        time.sleep(1)
        return Observation(done=True)

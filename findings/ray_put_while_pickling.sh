#!/usr/bin/env bash
# ray 2.60.0: a `ray.put` while another object is pickled pins that object's later references for the life of the process.
#
# `__reduce__` may call anything, and putting a large part of an object into the store while it is pickled looks like the natural
# way to send the part once. But Ray notes in a record of the thread which references the outer object holds, and the inner put
# clears that record. Each reference that is pickled after it counts as sent out of band and is never released: after every copy
# is gone, the store still holds what it names. No warning is printed. From another thread the same put leaves nothing behind.
#
# Ends with 0 while Ray behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "ray==2.60.0" "numpy==2.4.6" "grpcio==1.85.3" "psutil==7.2.2"
cat >"$folder/pinned.py" <<'PY'
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address

MIB = 1 << 20
other_thread = ThreadPoolExecutor(1)


class Part:
    """A part of a message that goes to the store when it is pickled."""

    def __init__(self, size, put):
        self.data, self.put = np.ones(size, dtype=np.uint8), put

    def __reduce__(self):
        return list, ((self.put(self.data),),)


def here(data):
    return ray.put(data)


def elsewhere(data):
    return other_thread.submit(ray.put, data).result()


def held(put):
    """MiB that the store holds more than before, after four messages of two parts of 8 MiB are gone."""
    before = used()
    for _ in range(4):
        message = ray.put([Part(8 * MIB, put), Part(8 * MIB, put)])
        del message
        gc.collect()
    deadline = time.monotonic() + 5
    while used() - before > 1 and time.monotonic() < deadline:
        time.sleep(0.2)
    return round(used() - before)


def used():
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    return get_memory_info_reply(state).store_stats.object_store_bytes_used / MIB


ray.init(num_cpus=1, object_store_memory=400 * MIB, include_dashboard=False, logging_level="error")
found = {"put on the thread that pickles": held(here), "put on another thread": held(elsewhere)}
for name, left in found.items():
    print(f"{name}: {left} MiB still held")
print("ray", ray.__version__)
ray.shutdown()
first, second = found.values()
raise SystemExit(not (first >= 8 and second <= 1))
PY
RAY_USAGE_STATS_ENABLED=0 "$folder/env/bin/python" "$folder/pinned.py"
# Seen on 2026-11-27, Python 3.11, x86-64:
# put on the thread that pickles: 64 MiB still held
# put on another thread: 0 MiB still held

#!/usr/bin/env bash
# openai 3.57.0 with cloudpickle 3.1.3: a function that names DefaultAsyncHttpxClient cannot make one in another process.
#
# Tools that send a user's function to workers (Ray, Dask, joblib's loky) pickle it by cloudpickle, which sends classes of
# installed packages by their name. So one expects `from openai import AsyncOpenAI, DefaultAsyncHttpxClient` to be two imports in
# the worker. But the SDK gives its classes the module "openai", while this one is called `_DefaultAsyncHttpxClient` and has no
# such name there: cloudpickle sends the class itself, and the `super()` of its copy refuses the new object. AsyncOpenAI, which is
# found by its name, works, and so does `openai.DefaultAsyncHttpxClient` as an attribute of the module. The same holds for
# DefaultHttpxClient, and for anthropic's SDK.
#
# Ends with 0 while they behave so, with 1 once they do not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "openai==3.57.0" "cloudpickle==3.1.3"
cat >"$folder/send.py" <<'PY'
from sys import argv

import cloudpickle
import openai
from openai import AsyncOpenAI, DefaultAsyncHttpxClient


def by_name():
    return type(DefaultAsyncHttpxClient()).__name__


def by_module():
    return type(openai.DefaultAsyncHttpxClient()).__name__


def client():
    return type(AsyncOpenAI(api_key="none")).__name__


by_name()  # here it works
with open(argv[1], "wb") as file:
    cloudpickle.dump([by_name, by_module, client], file)
PY
cat >"$folder/receive.py" <<'PY'
import pickle
from importlib.metadata import version
from sys import argv

found = []
for function in pickle.load(open(argv[1], "rb")):
    try:
        found.append(function())
    except TypeError as error:
        found.append(f"TypeError: {error}")
    print(f"{function.__name__}: {found[-1]}")
print("openai", version("openai"), "cloudpickle", version("cloudpickle"))
fails, *work = found
raise SystemExit(not (fails.startswith("TypeError: super") and work == ["_DefaultAsyncHttpxClient", "AsyncOpenAI"]))
PY
"$folder/env/bin/python" "$folder/send.py" "$folder/functions"
"$folder/env/bin/python" "$folder/receive.py" "$folder/functions"
# Seen on 2026-11-29, Python 3.11, x86-64:
# by_name: TypeError: super(type, obj): obj must be an instance or subtype of type
# by_module: _DefaultAsyncHttpxClient
# client: AsyncOpenAI

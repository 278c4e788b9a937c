#!/usr/bin/env bash
# datasets 5.2.0: a text in a JSON file comes back as a datetime if each text of its column looks like a date.
#
# JSON has texts and no dates, so one expects a string that is written to be a string that is read. `load_dataset("json")` leaves
# the types of columns to pyarrow's reader, which makes timestamps of strings in ISO form. So a ground truth "2024-01-05" no longer
# equals the text that a model writes, and str() of it has a time of day; one row with another text in the same column changes
# the type of all others back. The same values in a parquet file, or by Dataset.from_list, stay strings.
#
# Ends with 0 while datasets behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "datasets==5.2.0" "pyarrow==26.0.1"
cat >"$folder/dates.py" <<'PY'
import json
from pathlib import Path
from sys import argv

import datasets
import pyarrow

folder = Path(argv[1])


def answers(name, *rows):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"answer": row}) + "\n" for row in rows))
    return datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))["answer"][:]


dates = answers("dates", "2024-01-05", "2023-12-31")
beside = answers("beside", "2024-01-05", "a Friday")
given = datasets.Dataset.from_list([{"answer": "2024-01-05"}])["answer"][:]
print("dates alone:", [repr(each) for each in dates])
print("with another text in the column:", beside)
print("by Dataset.from_list:", given)
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
raise SystemExit([type(each).__name__ for each in (*dates, *beside, *given)] != ["datetime"] * 2 + ["str"] * 3)
PY
HF_HUB_OFFLINE=1 "$folder/env/bin/python" "$folder/dates.py" "$folder"
# Seen on 2026-11-27, Python 3.11, x86-64:
# dates alone: ['datetime.datetime(2024, 1, 5, 0, 0)', 'datetime.datetime(2023, 12, 31, 0, 0)']
# with another text in the column: ['2024-01-05', 'a Friday']
# by Dataset.from_list: ['2024-01-05']

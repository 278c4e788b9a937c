#!/usr/bin/env bash
# math-verify 0.9.0: two words in boxes are equal if they have the same letters.
#
# An answer in a box is a text for a person: "left" and "felt" are different words. `parse` hands what is in the box to sympy as
# LaTeX, where letters next to each other are factors, and a product does not know the order of its factors. So \boxed{left}
# equals \boxed{felt}, and a policy that writes "no" is rewarded where "on" is right. `\text{...}` around the word makes a symbol
# of it, and then words differ. Without a box, a word or a single letter is parsed to nothing, which equals nothing.
#
# Ends with 0 while math-verify behaves so, with 1 once it does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet "math-verify==0.9.0" "latex2sympy2_extended==1.11.0" "sympy==1.14.0" "antlr4-python3-runtime==4.13.2"
cat >"$folder/words.py" <<'PY'
from importlib.metadata import version

from math_verify import parse, verify


def equal(truth, answer):
    return verify(parse(truth), parse(answer))


pairs = [(r"\boxed{left}", r"\boxed{felt}"), (r"\boxed{on}", r"\boxed{no}"), (r"\boxed{\text{left}}", r"\boxed{\text{felt}}")]
found = [equal(*pair) for pair in pairs]
for pair, same in zip(pairs, found):
    print(*pair, "equal" if same else "different")
print("left, without a box:", parse("left"), "A:", parse("A"))
print("math-verify", version("math-verify"))
raise SystemExit(not (found == [True, True, False] and parse("left") == parse("A") == []))
PY
"$folder/env/bin/python" "$folder/words.py"
# Seen on 2026-11-28, Python 3.11, x86-64:
# \boxed{left} \boxed{felt} equal
# \boxed{on} \boxed{no} equal
# \boxed{\text{left}} \boxed{\text{felt}} different
# left, without a box: [] A: []

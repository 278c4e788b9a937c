"""What a rank along sp holds: each activation of the packed model shrinks as ranks share a sequence, and so does their peak.

Log-probs and gradients stay those of one process. `tests/workers/test_ulysses.py` checks two ranks of one family in each run.
"""

from functools import partial

import pytest
from torch import distributed

from helpers.allocations import allocated, check_share, config_of, long_rows
from helpers.layouts import differences, joined, run_pass
from helpers.processes import run_ranks
from workers.ranks.layout import Layout

# With plain features, with deep ones, with tiles, and with heads that are wider than the states.
MODELS = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma4")


def equals_one_process(model_type: str, layout: Layout) -> list[str]:
    config = config_of(model_type)
    data = long_rows(config)
    found = run_pass(config, data, joined(layout))
    return differences(found, run_pass(config, data)) if distributed.get_rank() == 0 else []


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(sp=2), Layout(sp=4), Layout(sp=2, tp=2)], ids=str)
def test_ranks_have_their_part_of_everything(tmp_path, layout):
    size = layout.sp * layout.tp
    cases = {model: partial(allocated, model, layout) for model in MODELS}
    equal = {f"{model}, equal": partial(equals_one_process, model, layout) for model in MODELS}
    outcomes = run_ranks(size, cases | equal, tmp_path)
    for model in MODELS:
        whole = allocated(model, Layout())
        for found in outcomes[model]:
            assert not isinstance(found, str), found
            print(f"{model}, {layout}: {found}, alone {whole}")
            check_share(found, whole, layout.sp)
        assert outcomes[f"{model}, equal"] == [[]] * size

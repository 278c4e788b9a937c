from functools import partial
import pytest
import test_fsdp, test_ulysses, test_tensor_parallel
from helpers.processes import run_ranks
from helpers.tiny_models import tiny_model
from helpers.layouts import mixed_rows, odd_rows
TYPES=("gemma3",)
C={}
for t in TYPES:
    C |= {f"dp {t}": partial(test_fsdp.equals_one_process, t, "uneven", 30),
      f"row {t}": partial(test_fsdp.equals_row_by_row, t),
      f"inert {t}": partial(test_fsdp.an_inert_micro_batch_reaches_every_weight, t, test_fsdp.DP),
      f"sp {t}": partial(test_ulysses.equals_one_process, t, mixed_rows),
      f"tp {t}": partial(test_tensor_parallel.equals_one_process, t, mixed_rows),
      f"tp tied {t}": partial(test_tensor_parallel.equals_one_process, t, odd_rows, tied=True),
      f"tower {t}": partial(test_ulysses.features_of_images_and_videos, t, (3, 0)),
    }
@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    root = tmp_path_factory.mktemp("fsdp")
    for t in TYPES: tiny_model(t).save_pretrained(root / t)
    import os; os.environ["TEST_FSDP_FOLDER"]=str(root)
    return run_ranks(2, C, tmp_path_factory.mktemp("ranks"))
@pytest.mark.parametrize("name", C)
def test_it(outcomes, name):
    print(outcomes[name]); assert outcomes[name] in ([[],[]],[None,None]), outcomes[name]

"""Deprecations that our own calls cause fail a test, whether they are warned of or logged; those of other libraries do not."""

import logging
import warnings

import pytest
from torch import nn

LOG = logging.getLogger("transformers.modeling_utils").warning


class Renamed(nn.Module):
    """A model whose argument ``old`` is called ``new`` now, as transformers says it."""

    def forward(self, old):
        warnings.warn("`old` is deprecated and will be removed. Use `new` instead.", FutureWarning, stacklevel=2)


@pytest.mark.parametrize("kind", [DeprecationWarning, FutureWarning])
def test_what_a_warning_attributes_to_us_is_an_error(kind):
    with pytest.raises(kind, match="going away"):
        warnings.warn("it is going away", kind, stacklevel=1)


def test_an_old_argument_of_a_model_is_an_error():
    with pytest.raises(FutureWarning, match="`old` is deprecated"):
        Renamed()(old=1)


def test_what_transformers_logs_of_our_call_is_an_error():
    with pytest.raises(FutureWarning, match="`x` is deprecated"):
        LOG("`x` is deprecated")


def test_what_other_libraries_cause_is_none():
    code = compile("log('`x` is deprecated')", "/lib/site-packages/peft/model.py", "exec")
    exec(code, {"log": LOG})
    with pytest.warns(FutureWarning):
        warnings.warn_explicit("`x` is deprecated", FutureWarning, "model.py", 1, module="peft.model")

"""Numbers of fewer bits, by torchao: base weights of adapters in 4 bits, and products of linear layers in float8."""

from typing import TYPE_CHECKING

from dataproto.extras import lazy_names

if TYPE_CHECKING:
    from workers.model.quantized.float8 import check_float8, use_float8
    from workers.model.quantized.nf4 import dense, four_bit
    from workers.model.quantized.torchao_package import needs_torchao

__all__ = ["check_float8", "dense", "four_bit", "needs_torchao", "use_float8"]

__getattr__ = lazy_names(__name__, __file__)

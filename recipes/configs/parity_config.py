"""How far an engine's log-probs are from the actor's: ``dataproto parity``.

The engine takes the weights of the actor and answers prompts with and without images; the actor scores them. With no arguments:
vLLM and the small model in float32. Ends with status 1 where a difference exceeds ``--tolerance``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from recipes.configs.shared.run_config import check_at_least, check_engine, check_seed
from recipes.options import parse_config


@dataclass(frozen=True)
class ParityConfig:
    """What is compared, on how many rows.

    Attributes:
        model_path: checkpoint directory or hub name; by default a small Qwen2.5-VL is made on the spot
        data_path: prompts: parquet file, folder, or data set name; default: synthetic problems with and without pictures
        engine: engine that generates: hf or vllm
        engine_options: options of the engine
        dtype: type of the computation of engine and actor
        tolerance: largest difference of a log-prob that ends with status 0
        rows: number of prompts
        n: samples of each prompt
        temperature: temperature of sampling and of both sides' log-probs
        max_prompt_length: tokens of a prompt
        max_response_length: tokens of a response
        seed: seed of sampling, and of the small model
    """

    model_path: str | None = None
    data_path: str | None = None
    engine: str = "vllm"
    engine_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    dtype: Literal["float32", "bfloat16"] = "float32"
    tolerance: float | None = None
    rows: int = 32
    n: int = 4
    temperature: float = 1.0
    max_prompt_length: int = 2048
    max_response_length: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_engine(self.engine, self.engine_options)
        check_seed(self.seed)
        check_at_least(1, self, "rows")


def parse(arguments: Sequence[str]) -> ParityConfig:
    """The configuration of a command line; ``--config FILE`` reads options from a file.

    Raises:
        InvalidConfig: an unknown or ill-typed option, in one line.
    """
    return parse_config(arguments, ParityConfig(), __doc__, "dataproto parity")

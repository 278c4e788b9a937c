"""A Qwen2.5-VL or Qwen3.5 checkpoint of a real size with random weights, tokenizer and image processor, for machines without a
network.

python benchmarks/random_checkpoint.py 7b OUTPUT_DIRECTORY
python benchmarks/random_checkpoint.py qwen3.5-9b OUTPUT_DIRECTORY
python benchmarks/random_checkpoint.py 3b OUTPUT_DIRECTORY --without-weights     # for engines with ``load_format`` "dummy"
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoImageProcessor, Qwen2_5_VLConfig  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402

from benchmarks.workload import TEXT, VISION, VOCABULARY, model_config  # noqa: E402
from dataproto.vlm import family_of  # noqa: E402
from dataproto.vlm.prediction_head import PredictionHead  # noqa: E402
from recipes.demo.tiny_model import make_tiny_model  # noqa: E402


def make(path: Path, size: str) -> Path:
    """Writes the checkpoint, unless the directory already has one, in a process of its own, which leaves the GPU empty."""
    if not (path / "config.json").is_file():
        subprocess.run([sys.executable, __file__, size, str(path)], check=True)
    return path


def write(path: Path, size: str, weights: bool = True) -> Path:
    """Writes the checkpoint in bfloat16. Without ``weights`` it has no weights but those of its head that drafts, if any."""
    make_tiny_model(path)  # tokenizer, image processor, generation settings
    if size == "tiny":
        return path
    tiny = Qwen2_5_VLConfig.from_pretrained(path)
    config = _qwen3_5(path, size, tiny) if "qwen3.5" in size else _qwen2_5_vl(path, size, tiny)
    torch.manual_seed(0)
    with torch.device("meta" if not weights else "cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = family_of(config).model_class().from_config(config)
        torch.set_default_dtype(torch.float32)
    for file in path.glob("*.safetensors"):
        file.unlink()
    head: dict[str, Tensor] = {}
    if "qwen3.5" in size:  # engines find a head that drafts by the names of its weights
        found = PredictionHead(family_of(config), model).state_dict()
        head = {f"mtp.{name}": weight.bfloat16() for name, weight in found.items()}
        model.config.text_config.mtp_num_hidden_layers = 1
    if weights:
        model.save_pretrained(path, state_dict=model.state_dict() | head)
        return path
    if head:
        save_file(head, path / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    return path


MARKS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _qwen2_5_vl(path: Path, size: str, tiny: Any) -> Any:
    """The config, with the tokens of ``tiny``; writes the image processor's limits as published."""
    processor = AutoImageProcessor.from_pretrained(path, use_fast=False)
    processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}
    processor.save_pretrained(path)
    text = tiny.text_config.to_dict() | TEXT[size]
    text |= {"vocab_size": VOCABULARY[size], "tie_word_embeddings": size == "3b"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text.pop("layer_types", None)
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tiny.vision_config.to_dict() | VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=size == "3b",
        **{name: getattr(tiny, name) for name in MARKS},
    )


def _qwen3_5(path: Path, size: str, tiny: Any) -> Any:
    """The config, with the tokens of ``tiny``; writes an image processor for its patches."""
    config = model_config(size)
    vision = config.vision_config
    for name in MARKS:
        setattr(config, name, getattr(tiny, name))
    config.text_config.eos_token_id = tiny.get_text_config().eos_token_id
    side = vision.patch_size * vision.spatial_merge_size
    Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=4 * side**2,
        max_pixels=16_384 * side**2,
    ).save_pretrained(path)
    return config


if __name__ == "__main__":
    write(Path(sys.argv[2]), sys.argv[1], weights="--without-weights" not in sys.argv)

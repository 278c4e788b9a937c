"""A Qwen2.5-VL checkpoint of a real size with random weights, tokenizer and image processor, for machines without a network.

python benchmarks/random_checkpoint.py 7b OUTPUT_DIRECTORY
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(place for place in sys.path if Path(place or ".").resolve() != HERE)]

import torch  # noqa: E402
from transformers import AutoImageProcessor, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

from benchmarks.workload import TEXT, VISION, VOCABULARY  # noqa: E402
from recipes.tiny import make_tiny_model  # noqa: E402


def make(path: Path, size: str) -> Path:
    """Writes the checkpoint in bfloat16, unless the directory already has one."""
    if (path / "config.json").is_file():
        return path
    make_tiny_model(path)  # tokenizer, image processor, generation settings
    if size == "tiny":
        return path
    processor = AutoImageProcessor.from_pretrained(path, use_fast=False)
    processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16_384}  # as published
    processor.save_pretrained(path)
    tiny = Qwen2_5_VLConfig.from_pretrained(path)
    text = tiny.text_config.to_dict() | TEXT[size]
    text |= {"vocab_size": VOCABULARY[size], "tie_word_embeddings": size == "3b"}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text.pop("layer_types", None)
    marks = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tiny.vision_config.to_dict() | VISION | {"out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=size == "3b",
        **{name: getattr(tiny, name) for name in marks},
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2_5_VLForConditionalGeneration(config)
        torch.set_default_dtype(torch.float32)
    for file in path.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(path)
    return path


if __name__ == "__main__":
    make(Path(sys.argv[2]), sys.argv[1])

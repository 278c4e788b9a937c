"""A byte-level BPE tokenizer like Qwen's, trained locally, with Qwen2.5-VL's special tokens and chat template."""

from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"

SPECIAL_TOKENS = (  # in the order of their ids in Qwen2.5-VL
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    VISION_START,
    VISION_END,
    "<|vision_pad|>",
    IMAGE_PAD,
    VIDEO_PAD,
)
WORD_TOKENS = ("<think>", "</think>")  # single tokens, but not special, as in Qwen3

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Qwen2Tokenizer:
    """Trains on ``texts`` until there are ``vocabulary`` tokens, or fewer if no merges are left.

    Special tokens have the last ids, as in Qwen's tokenizers.
    """
    words = SPECIAL_TOKENS + WORD_TOKENS
    untrained = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer  # for Qwen's normalizer and pre-tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = untrained.normalizer, untrained.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(words), initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.decoder = untrained.decoder
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORD_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=None,  # type: ignore[arg-type]
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=32_768,
    )

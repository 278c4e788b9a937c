"""A byte-level tokenizer with the special tokens and chat template of a family, and a small image processor."""

from functools import cache, reduce
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast, WhisperFeatureExtractor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from helpers.tiny_models import GEMMA4_TYPES, GLM_TYPES, OMNI_TYPES, TEXT_TYPES, TILE, TILED, tiny_config
from rollout.image_processors import KimiImageProcessor, MuseImageProcessor
from rollout.prompts import PromptBuilder

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPECIAL_ENDS = ("vision_start", "vision_end")
IDEFICS3_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
INTERNVL_SPECIAL = (*SPECIAL[:3], "<img>", "</img>", "<IMG_CONTEXT>", "<video>")
GEMMA_SPECIAL = (
    *("<pad>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("\n" * count for count in range(1, 5)),  # one token for each run of line breaks, as in the published vocabulary
)
MUSE_SPECIAL = (
    *SPECIAL[:3],
    *("<|image_start|>", "<|image_end|>", "<|patch|>", "<|video|>", "<|image|>"),
    *("<|vid_start|>", "<|vid_end|>", "<|vid_frame_separator|>"),
)
MINICPM_SPECIAL = (
    *SPECIAL[:3],
    *(f"<{slash}{name}>" for name in ("image", "slice", "image_id") for slash in ("", "/")),
    *SPECIAL[5:],
)
OMNI_SPECIAL = (
    *SPECIAL[:3],
    *("<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"),
)
OMNI3_SPECIAL = (*SPECIAL, "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
GLM_SPECIAL = (
    *SPECIAL[:3],
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|video|>"),
)
NAMED_TOKENS = {  # attributes of published tokenizers, which the processors of vLLM read
    "<IMG_CONTEXT>": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
    "<slice>": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        **{
            f"{name}_{end}_token": f"<{slash}{name}>"
            for name in ("image", "slice", "image_id")
            for end, slash in (("start", ""), ("end", "/"))
        },
    },
}
_OMNI_NAMES = ("vision_bos", "vision_eos", "image", "video", "audio_bos", "audio_eos", "audio")
NAMED_TOKENS |= {
    special[-1]: {f"{name}_token": token for name, token in zip(_OMNI_NAMES, special[3:], strict=True)}
    for special in (OMNI_SPECIAL, OMNI3_SPECIAL)
}
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""

INTERNVL_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "{{ '<IMG_CONTEXT>\\n' }}").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "{{ '<video>\\n' }}"
)
GLM_TEMPLATE = TEMPLATE.replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
).replace("<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>")
OMNI3_TEMPLATE = TEMPLATE.replace(
    "{%- else -%}{{ part['text'] }}",
    "{%- elif part['type'] == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>\n{%- else -%}{{ part['text'] }}",
)
OMNI_TEMPLATE = reduce(lambda text, pair: text.replace(*pair), zip(OMNI3_SPECIAL[3:], OMNI_SPECIAL[3:]), OMNI3_TEMPLATE)
MUSE_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|patch|>").replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|video|>"
)
MINICPM_TEMPLATE = TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
TEXT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
"""As that of Qwen's language models, it takes no parts: content must be a string."""
# That of SmolVLM's published checkpoints.
IDEFICS3_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# That of Gemma 3's published checkpoints, without its first token and without a system message.
GEMMA_TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}{%- set role = 'model' -%}"
    "{%- else -%}{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
GEMMA4_SPECIAL = (
    "<pad>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
    "<|audio>",
    "<audio|>",
)
GEMMA4_TEMPLATE = (
    "{%- for message in messages -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<|turn>' + role + '\n' }}{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
    "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<|image|>' }}"
    "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{ '<turn|>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"
)
_PROMPTS = {
    **dict.fromkeys(GEMMA4_TYPES, (GEMMA4_SPECIAL, GEMMA4_TEMPLATE)),
    "gemma3": (GEMMA_SPECIAL, GEMMA_TEMPLATE),
    "internvl": (INTERNVL_SPECIAL, INTERNVL_TEMPLATE),
    "internvl+qwen3_moe": (INTERNVL_SPECIAL, INTERNVL_TEMPLATE),
    **dict.fromkeys(GLM_TYPES, (GLM_SPECIAL, GLM_TEMPLATE)),
    "qwen2_5_omni_thinker": (OMNI_SPECIAL, OMNI_TEMPLATE),
    "qwen3_omni_moe_thinker": (OMNI3_SPECIAL, OMNI3_TEMPLATE),
    "minicpmv4_6": (MINICPM_SPECIAL, MINICPM_TEMPLATE),
    "muse_glimmer": (MUSE_SPECIAL, MUSE_TEMPLATE),
    "smolvlm": (IDEFICS3_SPECIAL, IDEFICS3_TEMPLATE),
    "idefics3": (IDEFICS3_SPECIAL, IDEFICS3_TEMPLATE),
}


def tiny_tokenizer(model_type: str = "qwen2_5_vl") -> Any:
    """A tokenizer of 256 bytes, a few merges and the special tokens, in this order."""
    if model_type in TEXT_TYPES:
        return _tokenizer(SPECIAL[:3], TEXT_TEMPLATE)
    return _tokenizer(*_PROMPTS.get(model_type, (SPECIAL, TEMPLATE)))


@cache
def _tokenizer(special: tuple[str, ...], template: str) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["Find the angle x of the triangle. The final answer MUST BE put in"], trainer)
    wrapped = Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[2],
        pad_token=special[0],
        additional_special_tokens=list(special),
        **next(({"model_specific_special_tokens": NAMED_TOKENS[each]} for each in special if each in NAMED_TOKENS), {}),
    )
    if special in (GEMMA_SPECIAL, GEMMA4_SPECIAL):  # names by which its processor finds them
        names = ("boi", "eoi", "image", "video", "audio", "boa", "eoa")[: 3 if special == GEMMA_SPECIAL else 7]
        named = {f"{name}_token": token for name, token in zip(names, special[3:], strict=False)}
        wrapped._set_model_specific_special_tokens(special_tokens=named)
    wrapped.chat_template = template
    return wrapped


def tiny_image_processor(model_type: str = "qwen2_5_vl") -> Any:
    """An image processor with 4-pixel patches merged 2 x 2: an image of 16 x 16 pixels has 4 tokens. None for text alone."""
    if model_type in TEXT_TYPES:
        return None
    if model_type == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": TILE, "width": TILE})
    if model_type in GEMMA4_TYPES:
        return Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    if model_type.startswith("internvl"):
        return GotOcr2ImageProcessorPil(size={"height": TILE, "width": TILE}, min_patches=1, max_patches=6)
    if model_type in ("smolvlm", "idefics3"):
        processor = {"smolvlm": SmolVLMImageProcessorPil, "idefics3": Idefics3ImageProcessorPil}[model_type]
        return processor(size={"longest_edge": 3 * TILE}, max_image_size={"longest_edge": TILE})
    if model_type == "minicpmv4_6":
        return MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=TILE, max_slice_nums=4)
    if model_type == "kimi_k25":
        return KimiImageProcessor(patch_size=4, merge_size=2, max_patches=256)
    if model_type == "muse_glimmer":
        return MuseImageProcessor(patch_size=4, merge_size=2, max_image_tokens=64)
    if model_type in GLM_TYPES:
        limits = {"shortest_edge": 64, "longest_edge": 4096}
        return Glm4vImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=limits)
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=4096)


def tiny_feature_extractor(model_type: str) -> Any:
    """What makes 8 mel bins of sounds of up to 30 seconds. None for models that do not hear."""
    return WhisperFeatureExtractor(feature_size=8, return_attention_mask=True) if model_type in OMNI_TYPES else None


def tiny_prompt_config(model_type: str = "qwen2_5_vl") -> Any:
    """`tiny_config` with the token ids of `tiny_tokenizer`."""
    tokenizer, config = tiny_tokenizer(model_type), tiny_config(model_type)
    config.get_text_config().vocab_size = len(tokenizer)
    if model_type in TEXT_TYPES:
        return config
    if model_type == "gemma3":
        for name, token in (("image", "image_soft_token"), ("boi", "start_of_image"), ("eoi", "end_of_image")):
            setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<{token}>"))
        return config
    if model_type in GEMMA4_TYPES:
        config.get_text_config().vocab_size_per_layer_input = len(tokenizer)
        config.vision_config.position_embedding_size = 256
        for name, place in {"image": 5, "video": 6, "audio": 7, "boi": 3, "eoi": 4, "boa": 8}.items():
            setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(GEMMA4_SPECIAL[place]))
        config.eoa_token_index = tokenizer.convert_tokens_to_ids(GEMMA4_SPECIAL[9])
        return config
    if model_type in TILED:
        placeholder = "<IMG_CONTEXT>" if model_type.startswith("internvl") else "<image>"
        config.image_token_id = tokenizer.convert_tokens_to_ids(placeholder)
        return config
    if model_type == "muse_glimmer":
        for kind, token in (("image", "patch"), ("video", "video")):
            setattr(config, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(f"<|{token}|>"))
        return config
    if model_type in GLM_TYPES:
        for kind in ("image", "video"):
            names = {"token": kind, "start_token": f"begin_of_{kind}", "end_token": f"end_of_{kind}"}
            for name, token in names.items():
                setattr(config, f"{kind}_{name}_id", tokenizer.convert_tokens_to_ids(f"<|{token}|>"))
        return config
    if model_type in OMNI_TYPES:
        names = ("vision_start", "vision_end", "image", "video", "audio_start", "audio_end", "audio")
        for name, token in zip(names, _PROMPTS[model_type][0][3:], strict=True):
            setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        return config
    for name, token in (("image", "image_pad"), ("video", "video_pad"), *(2 * (each,) for each in SPECIAL_ENDS)):
        if name != token or f"<|{token}|>" in tokenizer.get_vocab():
            setattr(config, f"{name}_token_id", tokenizer.convert_tokens_to_ids(f"<|{token}|>"))
    return config


def tiny_builder(model_type: str = "qwen2_5_vl", max_prompt_length: int = 512, **options: Any) -> PromptBuilder:
    """A `PromptBuilder` of the tiny tokenizer, image processor and config."""
    parts = tiny_tokenizer(model_type), tiny_image_processor(model_type), tiny_prompt_config(model_type)
    return PromptBuilder(*parts, max_prompt_length, feature_extractor=tiny_feature_extractor(model_type), **options)

"""A small Qwen2.5-VL or thinker of Qwen2.5-Omni, of the Hugging Face class with its processors, and its warm-up.

The checkpoint is an ordinary one. The warm-up, on random answers, teaches their format, but nothing about pictures or sounds.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, Qwen2_5_VLConfig, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dataproto import DataProto
from dataproto.errors import WAY_OUT, FileNotWritten
from recipes.demo.problems import sample_texts
from recipes.demo.sounds import problem_of_level
from rollout.engine import Completion, SamplingParams
from rollout.prompts import PromptBuilder
from rollout.responses import attach_responses
from workers.model.packed_model import Outputs
from workers.roles.actor import ActorConfig, ActorWorker
from workers.training.optimizer import OptimizerConfig

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"

_PARTS = [f"<|{part}_{end}|>" for part in ("object_ref", "box", "quad", "vision") for end in ("start", "end")]
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN, *_PARTS, "<|vision_pad|>", IMAGE_PAD, VIDEO_PAD)
"""In the order of their ids in Qwen2.5-VL."""
SOUND_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
SOUND_TEXTS = ("Which note?", "How many clicks?", "Which digit?")
WORD_TOKENS = ("<think>", "</think>")  # single tokens, but not special, as in Qwen3

CHAT_TEMPLATE = Path(__file__).with_name("qwen_chat_template.jinja").read_text(encoding="utf-8")


def train_tokenizer(texts: Iterable[str], vocabulary: int, special: Sequence[str] = SPECIAL_TOKENS) -> Qwen2Tokenizer:
    """Trains on ``texts`` until there are ``vocabulary`` tokens, or fewer if no merges are left.

    Special tokens have the last ids, as in Qwen's tokenizers.
    """
    words = (*special, *WORD_TOKENS)
    untrained = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer  # for Qwen's normalizer and pre-tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = untrained.normalizer, untrained.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(words), initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.decoder = untrained.decoder
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORD_TOKENS])
    return Qwen2Tokenizer(
        tokenizer_object=bpe,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        unk_token=None,  # type: ignore[arg-type]
        extra_special_tokens=list(special[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=32_768,
    )


# These make white paper a zero input. With CLIP's mean and standard deviation GRPO learns nothing.
WHITE, CONTRAST = (1.0, 1.0, 1.0), (0.5, 0.5, 0.5)
WEIGHTS, FILES = "model.safetensors", ("config.json", "tokenizer.json", "preprocessor_config.json")
"""Files without which a checkpoint of `make_tiny_model` cannot be loaded."""


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; by default it has about 0.7 million parameters."""

    vocabulary: int = 512
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    vision_width: int = 64
    vision_depth: int = 2
    vision_heads: int = 2
    vision_mlp: int = 2  # width of the tower's MLPs, over its own
    sound_width: int = 64
    patch: int = 14  # pixels; a visual token covers 2 x 2 patches
    text_std: float = 0.02  # of the decoder's initial weights
    # Of those of the towers for images and sounds; with Hugging Face's 0.02 GRPO learns nothing.
    vision_std: float = 0.1
    min_pixels: int = 56 * 56
    max_pixels: int = 280 * 280


def make_tiny_model(
    path: str | Path,
    seed: int = 0,
    config: TinyConfig | None = None,
    texts: Iterable[str] | None = None,
    hears: bool = False,
) -> Path:
    """Writes a randomly initialised checkpoint to the directory ``path``; equal arguments give equal weights.

    It loads with ``Qwen2_5_VLForConditionalGeneration.from_pretrained``, ``AutoTokenizer`` and ``AutoImageProcessor``.

    Args:
        texts: prompts and answers on which the tokenizer is trained; by default those of the synthetic problems.
        hears: make the thinker of a Qwen2.5-Omni, ``Qwen2_5OmniThinkerForConditionalGeneration``.

    Returns:
        ``path``.
    """
    config = config or TinyConfig()
    path = make_tiny_processors(path, config, texts, hears)
    model = random_model(AutoConfig.from_pretrained(path), config.vision_std, seed)
    model.generation_config = GenerationConfig.from_pretrained(path)
    model.save_pretrained(path)
    return path


def make_tiny_processors(
    path: str | Path, config: TinyConfig | None = None, texts: Iterable[str] | None = None, hears: bool = False
) -> Path:
    """Writes all of `make_tiny_model` but the weights: configuration, tokenizer, and the processors of images and sounds."""
    config, path = config or TinyConfig(), Path(path)
    if texts is None:
        texts = SOUND_TEXTS if hears else sample_texts()
    special = SPECIAL_TOKENS + (SOUND_TOKENS if hears else ())
    # The texts, and what templates and answers have around them.
    fixed = ["system\nYou are a helpful assistant.", "user\n", "assistant\n", "look", " \\boxed{x}"]
    tokenizer = train_tokenizer([*(100 * fixed), *texts], config.vocabulary, special)
    made: Any = model_config(config, tokenizer)
    made = thinker_config(config, made, tokenizer) if hears else made
    made.save_pretrained(path)
    ends = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    GenerationConfig(do_sample=True, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id).save_pretrained(path)
    images = Qwen2VLImageProcessorPil(
        patch_size=config.patch,
        min_pixels=config.min_pixels,
        max_pixels=config.max_pixels,
        image_mean=WHITE,
        image_std=CONTRAST,
    )
    sounds = transformers.WhisperFeatureExtractor(feature_size=made.audio_config.num_mel_bins) if hears else None
    PromptBuilder(tokenizer, images, made, 1, feature_extractor=sounds).save_pretrained(path)
    return path


def is_whole(path: Path) -> bool:
    """Whether a directory has all files of a checkpoint of `make_tiny_model`, none of them cut."""
    try:
        for name in FILES:
            json.loads((path / name).read_text(encoding="utf-8"))
        with safe_open(path / WEIGHTS, framework="pt"):
            return True
    except (OSError, ValueError, SafetensorError):
        return False


def model_of_run(path: Path, keep: bool, make: Callable[[Path], object], way_out: str = WAY_OUT) -> Path:
    """The small model of a run at ``path``, made whole or not at all.

    Args:
        keep: leave the one that is there, if it is whole: the run is resumed. A new run makes its own, since an earlier attempt
            may have had another seed.
        make: writes a checkpoint to the directory that it gets.

    Raises:
        FileNotWritten: the disk is full, say; with ``way_out``.
    """
    if keep and is_whole(path):
        return path
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make(draft)
        if not (keep and is_whole(path)):  # another process may have been faster; its checkpoint is equal
            shutil.rmtree(path, ignore_errors=True)
            draft.rename(path)
    except (OSError, SafetensorError) as error:
        raise FileNotWritten(f"the small model could not be written to {path}: {error}{way_out}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def random_model(config: Any, tower_std: float, seed: int) -> Any:
    """A float32 model with Hugging Face's initialisation, except the towers' matrices, which have ``tower_std``.

    The global random state does not change.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config).float()
        with torch.no_grad():
            towers = [part for name, part in model.model.named_children() if name in ("visual", "audio_tower")]
            for parameter in (parameter for tower in towers for parameter in tower.parameters()):
                if parameter.ndim > 1:
                    parameter.normal_(std=tower_std)
    return model


def model_config(config: TinyConfig, tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLConfig:
    """The Hugging Face configuration, with heads of 32 (a size that vLLM's CPU build supports) and windows of 112 pixels."""
    head = config.hidden // config.heads
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden,
        "intermediate_size": 2 * config.hidden,
        "num_hidden_layers": config.layers,
        "initializer_range": config.text_std,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads // 2,
        "max_position_embeddings": 32_768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [head // 8, 3 * head // 16, 3 * head // 16],
        },
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": config.vision_depth,
        "hidden_size": config.vision_width,
        "out_hidden_size": config.hidden,
        "intermediate_size": config.vision_mlp * config.vision_width,
        "num_heads": config.vision_heads,
        "patch_size": config.patch,
        "window_size": 112,
        "fullatt_block_indexes": [config.vision_depth - 1],
    }
    places = {"image": IMAGE_PAD, "video": VIDEO_PAD, "vision_start": VISION_START, "vision_end": VISION_END}
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in places.items()}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)


def thinker_config(config: TinyConfig, seen: Qwen2_5_VLConfig, tokenizer: Qwen2Tokenizer) -> Any:
    """The configuration of a thinker with the decoder and the vision tower of a small Qwen2.5-VL."""
    text, vision = seen.get_text_config().to_dict(), seen.vision_config.to_dict()  # type: ignore[union-attr]
    sound = {
        "d_model": config.sound_width,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 2 * config.sound_width,
        "output_dim": config.hidden,
    }
    names = ("audio_start_token_id", "audio_end_token_id", "audio_token_index")
    ids: dict[str, Any] = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, SOUND_TOKENS)}
    ids |= {"image_token_index": seen.image_token_id, "video_token_index": seen.video_token_id}
    ids |= {name: getattr(seen, name) for name in ("vision_start_token_id", "vision_end_token_id")}
    ids |= {"pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": False}
    return transformers.Qwen2_5OmniThinkerConfig(text_config=text, vision_config=vision, audio_config=sound, **ids)


ANSWER = "<think>look</think> \\boxed{{{answer}}}"
FIRST_PROBLEM = 2**32
"""Index of the first problem of the warm-up; those of a run begin at 0."""


STEPS, BATCH_SIZE, LR, PROBLEMS = 80, 32, 2e-3, 256
"""Of the warm-up."""


def tiny_checkpoint(
    seed: int = 0,
    cache: Path | None = None,
    phase: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    level: int | str = 1,
) -> Path:
    """The path of a tiny Qwen2.5-VL, or thinker of Qwen2.5-Omni, that gives random answers in the right format; created once for
    each seed.

    Args:
        seed: seed of the initial weights and of the warm-up.
        cache: directory of these checkpoints; by default ``dataproto`` in the user's cache directory.
        phase: is called with the name of each phase, and gives a context manager for its time.
        level: the problems; those about pictures, whose levels are numbers, have one model.

    Raises:
        FileNotWritten: the disk is full, say.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dataproto"
    path = root / f"tiny-{fingerprint(level)}-seed{seed}"
    if is_whole(path):
        print(f"tiny model: found in {path}")
        return path

    def make(draft: Path) -> None:
        with phase("making the tiny model"):
            make_tiny_model(draft, seed, hears=isinstance(level, str))
        print(f"tiny model: warming up for {STEPS} steps on random answers (their format, not the media)")
        with phase("warming up the tiny model"):
            loss = warm_up(draft, seed, level)
        print(f"tiny model: cross-entropy {loss:.3f} nats per token; saved in {path}")

    elsewhere = "set XDG_CACHE_HOME to another directory, or give a checkpoint as --model-path"
    return model_of_run(path, True, make, f"; make room or lift the limit there, {elsewhere}")


def warm_up(path: Path, seed: int = 0, level: int | str = 1, steps: int = STEPS) -> float:
    """Trains the checkpoint at ``path`` in place on random answers in the right format.

    Returns:
        The loss of the last step.
    """
    random = Random(f"warm-up/{seed}")
    problems = [problem_of_level(FIRST_PROBLEM + place, level, seed) for place in range(PROBLEMS)]
    answers = defaultdict(list)
    for problem in problems:
        answers[problem.kind].append(problem.answer)
    builder = PromptBuilder.from_pretrained(path, max_prompt_length=1024)
    prompts = builder([{"prompt": problem.text, **problem.media} for problem in problems])

    def batches() -> Iterator[DataProto]:
        while True:
            chosen = [random.randrange(len(problems)) for _ in range(BATCH_SIZE)]
            texts = [ANSWER.format(answer=random.choice(answers[problems[place].kind])) for place in chosen]
            yield answered_rows(builder, prompts[chosen], texts)

    return teach(path, batches(), steps, LR)


def teach(path: Path, batches: Iterator[DataProto], steps: int, lr: float) -> float:
    """Trains the checkpoint at ``path`` in place on the responses of batches; the loss of the last step."""
    schedule = OptimizerConfig(lr=lr, schedule="linear", warmup_steps=min(5, steps - 1), total_steps=steps)
    actor = ActorWorker(ActorConfig(str(path), optimizer=schedule))
    losses = [actor.update(rows, next_token_loss)["actor/loss"] for rows in islice(batches, steps)]
    actor.module.model.save_pretrained(path)
    return losses[-1]


def answered_rows(builder: PromptBuilder, prompts: DataProto, texts: list[str]) -> DataProto:
    """Prompts with the given texts as their responses, each followed by the end-of-turn token."""
    tokenizer = builder.tokenizer
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    completions = [Completion(row, tokens, [0.0] * len(tokens), "stop") for row, tokens in enumerate(ids)]
    width = SamplingParams(max_tokens=max(map(len, ids)))
    return attach_responses(prompts, completions, width, builder.family, tokenizer.pad_token_id)


def next_token_loss(outputs: Outputs, rows: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-probs ``(B, R)`` of the given tokens, as a loss function; there are no metrics."""
    return -outputs.log_probs, {}


def fingerprint(level: int | str) -> str:
    """A digest of everything that determines a checkpoint: sizes, settings, problems and versions."""
    settings = STEPS, BATCH_SIZE, LR, PROBLEMS, level
    parts = (astuple(TinyConfig()), settings, ANSWER, torch.__version__, transformers.__version__)
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=6)
    for problem in (problem_of_level(FIRST_PROBLEM + place, level) for place in range(8)):
        ((medium,),) = problem.media.values()
        content = np.asarray(medium[0] if isinstance(medium, tuple) else medium)
        digest.update(problem.text.encode() + problem.answer.encode() + content.tobytes())
    return digest.hexdigest()

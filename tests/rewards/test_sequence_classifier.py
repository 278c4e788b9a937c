"""Hugging Face sequence classifiers as reward functions, small ones with random weights."""

import pickle
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizerFast,
    Qwen2Config,
)

from dataproto.errors import RewardError
from recipes.demo.tiny_model import train_tokenizer
from recipes.rewards import RewardRow, SequenceClassifier, load_reward

ASKED = [{"role": "user", "content": [{"type": "image", "image": None}, {"type": "text", "text": "Find x."}]}]
ROWS = [RewardRow(text, "9", prompt=ASKED) for text in ("x is 9", "no", "x is nine and a half, or so I think")]


def written(path, config, tokenizer):
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    torch.nn.init.normal_(
        next(module for name, module in model.named_modules() if name in ("score", "classifier")).weight
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def decoder(path, labels, pad_token=True):
    tokenizer = train_tokenizer([row.solution_str for row in ROWS], 300)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=128, num_labels=labels, **sizes
    )
    if not pad_token:
        tokenizer.pad_token = None
    return written(path, config, tokenizer)


def encoder(path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "find", "x", ".", "is", "9", "no", "nine", "a", "half"]
    (path / "vocab.txt").write_text("\n".join(words))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=32, num_labels=1, **sizes)
    return written(path, config, BertTokenizerFast(str(path / "vocab.txt")))


def logits_of(path, ids):
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return [model(torch.tensor([each])).logits[0] for each in ids]


@pytest.mark.parametrize("pad_token", [True, False])
def test_one_label_scores_with_its_logit_in_the_models_own_chat_template(tmp_path, pad_token):
    path = decoder(tmp_path, 1, pad_token)
    tokenizer = AutoTokenizer.from_pretrained(path)
    head = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nFind x.<|im_end|>\n"
    texts = [f"{head}<|im_start|>assistant\n{row.solution_str}<|im_end|>\n" for row in ROWS]
    expected = [float(logits[0]) for logits in logits_of(path, tokenizer(texts)["input_ids"])]
    scores = [each["score"] for each in load_reward(f"classifier:{path}")(ROWS)]  # three lengths in one batch
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in scores}) == 3
    assert [each["score"] for each in SequenceClassifier(path, batch_size=2)(ROWS)] == pytest.approx(expected, abs=1e-5)


def test_of_several_labels_one_is_the_score(tmp_path):
    path = decoder(tmp_path, 3)
    shares = [[each["score"] for each in SequenceClassifier(path, label)(ROWS)] for label in range(3)]
    assert [sum(each) for each in zip(*shares, strict=True)] == pytest.approx([1, 1, 1])
    with pytest.raises(RewardError, match="has 3 labels, so label=3 does not exist"):
        SequenceClassifier(path, 3)(ROWS)


def test_a_model_without_a_chat_template_sees_the_pair(tmp_path):
    path = encoder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [tokenizer("Find x.", row.solution_str) for row in ROWS]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        expected = [float(model(**each.convert_to_tensors("pt", prepend_batch_axis=True)).logits[0, 0]) for each in ids]
    assert [each["score"] for each in SequenceClassifier(path)(ROWS)] == pytest.approx(expected, abs=1e-5)


def test_a_language_model_is_refused_since_its_score_would_be_random(tmp_path):
    config = AutoConfig.from_pretrained(decoder(tmp_path, 1))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RewardError, match="not a sequence classifier but a Qwen2ForCausalLM, which has no score"):
        load_reward(f"classifier:{tmp_path}", here=True)
    with pytest.raises(RewardError, match=r"it lacks score\.weight, which would be random"):
        SequenceClassifier(str(tmp_path))(ROWS)


@pytest.mark.parametrize("folder", ["", "run", "run/global_step_4"])
def test_a_folder_without_a_checkpoint_is_told_before_models_are_loaded(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    Path("run/global_step_4/actor").mkdir(parents=True)
    Path("run/config.json").write_text("{}")  # of the run
    with pytest.raises(RewardError, match=r"is not a sequence classifier: .*RUN/global_step_N/actor/huggingface"):
        load_reward(f"classifier:{folder}", here=True)


def test_a_text_that_is_too_long_is_named(tmp_path):
    with pytest.raises(RewardError, match=r"row 1: \d+ tokens of prompt and response, but .* takes 128"):
        SequenceClassifier(decoder(tmp_path, 1))([ROWS[0], RewardRow("word " * 199, "9", prompt=ASKED)])


def test_another_process_loads_its_own_model(tmp_path):
    reward = SequenceClassifier(decoder(tmp_path, 1))
    scores = reward(ROWS)
    sent = pickle.dumps(reward)
    assert len(sent) < 1000
    assert pickle.loads(sent)(ROWS) == scores
    assert reward([]) == []


def test_what_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(RewardError, match="is not a sequence classifier"):
        SequenceClassifier(str(tmp_path / "nowhere"))(ROWS)

"""A reward model that learns from pairs with pictures, and that ``--reward classifier:`` then loads."""

import pytest

from dataproto.errors import InvalidConfig, RewardError
from helpers.checkpoints import write_checkpoint
from recipes.demo.rows import DrawnPairs
from recipes.export import main as export
from recipes.reward_model import main, parse
from recipes.rewards import load_reward
from recipes.rewards.sequence_classifier import RankedAnswers
from recipes.run.preferences import sent
from recipes.watch.metrics_file import read_metrics
from rollout.answers import AnswersBuilder
from workers.roles.critic import HEAD_FILE, CriticConfig, ValueWorker, load_head
from workers.roles.reward import RewardRow
from workers.training.forward_pass import sharing


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three steps on synthetic pairs, with adapters, cut and resumed; and the same steps at once."""
    path = write_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))
    runs = tmp_path_factory.mktemp("runs")
    given = f"--preset any --model-path {path} --max-length 256 --batch-size 4 --eval-rows 4 --save-every 1".split()
    given += ["--optimizer.lr", "1e-2", "--optimizer.schedule", "constant", "--lora-rank", "2", "--eval-every", "1"]
    assert main([*given, "--steps", "3", "--output-dir", str(runs / "whole")]) == 0
    assert main([*given, "--steps", "2", "--output-dir", str(runs / "cut")]) == 0
    assert main(["--resume", str(runs / "cut"), "--steps", "3"]) == 0
    return runs


@pytest.mark.slow
def test_a_resumed_run_is_exact(run):
    whole, cut = (read_metrics(run / name / "metrics.jsonl") for name in ("whole", "cut"))
    for name in ("train/loss", "actor/grad_norm", "val/loss", "val/accuracy"):
        assert [row[name] for row in cut if name in row] == [row[name] for row in whole if name in row], name
    assert whole[1]["train/loss"] == pytest.approx(0.6931, abs=1e-4)  # the head begins at zero
    assert whole[-1]["train/loss"] != pytest.approx(0.6931, abs=1e-4)


@pytest.mark.slow
def test_a_classifier_reward_gives_the_scores_of_training(run):
    checkpoint = run / "cut" / "global_step_3" / "actor" / "huggingface"
    rows = DrawnPairs(0, "test")[:3]
    worker = ValueWorker(CriticConfig(str(checkpoint)))
    load_head(worker, checkpoint)
    data = AnswersBuilder.from_pretrained(checkpoint, 256).grouped("scored")(rows)
    expected = worker.values(sent(data))["values"].sum(1)
    shown = [{"type": "text", "text": "Which colour?"}]
    answers = [
        RewardRow(answer[0]["content"], None, prompt=[{"role": "user", "content": [image, *shown]}])
        for row in rows
        for image in [{"type": "image", "image": row["images"][0]}]
        for answer in row["answers"]
    ]
    scores = [each["score"] for each in load_reward(f"classifier:{checkpoint}")(answers)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    batch = RankedAnswers(str(checkpoint)).batch(answers)
    assert (
        sharing(worker.module, batch).tolist() == [False, True] * 3
    )  # a prompt is computed once for both of its answers
    assert len({round(score, 6) for score in scores}) > 1
    assert export([str(checkpoint.parents[1]), str(run / "exported"), "--dtype", "float32"]) == 0
    assert [each["score"] for each in load_reward(f"classifier:{run / 'exported'}")(answers)] == scores
    with pytest.raises(RewardError, match=r"row 0: .* cannot score it: it has no prompt"):
        load_reward(f"classifier:{checkpoint}")([RewardRow("red", None)])


def test_any_text_that_a_policy_may_sample_has_a_score(run):
    checkpoint = run / "cut" / "global_step_3" / "actor" / "huggingface"
    said = ["", " ", "\n", "an <image>", "<video><audio>", "</think>"]
    scores = load_reward(f"classifier:{checkpoint}")([RewardRow(text, None, prompt="Which colour?") for text in said])
    assert len({each["score"] for each in scores}) > 3


def test_tokens_of_media_in_a_response_are_text(run):
    checkpoint = run / "cut" / "global_step_3" / "actor" / "huggingface"
    image = {"type": "image", "image": DrawnPairs(0, "test")[0]["images"][0]}
    asked = [{"role": "user", "content": [image, {"type": "text", "text": "Which colour?"}]}]
    said = ["red", "a <|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|video_pad|>"]
    rows = [RewardRow(text, None, prompt=prompt) for prompt in ("Which colour?", asked) for text in said]
    scores = [each["score"] for each in load_reward(f"classifier:{checkpoint}")(rows)]
    assert len(set(scores)) == len(rows)
    reward = RankedAnswers(str(checkpoint))
    batch = reward.batch(rows)
    responses = batch["responses"]
    placeholder = reward.builder.config.image_token_id
    assert [placeholder in row for row in responses.tolist()] == [False, True, True, False] * 2
    assert not batch["mm_token_type_ids"][:, -responses.shape[1] :].any()
    with pytest.raises(RewardError, match=r"row 0: .* cannot score it: the text contains <\|image_pad\|>"):
        reward.batch([RewardRow("red", None, prompt="Which <|image_pad|>?")])


def test_a_head_of_another_model_is_refused(run, tmp_path):
    checkpoint = run / "cut" / "global_step_3" / "actor" / "huggingface"
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / HEAD_FILE).unlink()
    (tmp_path / HEAD_FILE).write_bytes(b"damaged")
    with pytest.raises(RewardError, match="is not a reward model"):
        load_reward(f"classifier:{tmp_path}")([RewardRow("red", None, prompt="Which colour?")])


@pytest.mark.parametrize("options", [["--keep-rows", "4"], ["--layout.pp", "2", "--on", "ray"], ["--mtp-coef", "0.1"]])
def test_options_that_a_reward_model_has_not_are_refused(options):
    with pytest.raises(InvalidConfig):
        parse(options)

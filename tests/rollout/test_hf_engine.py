"""The Hugging Face engine against a loop without cache, and its promises."""

import numpy as np
import pytest
import torch

from benchmarks.engine_weights import differing_weights
from dataproto import DataProto
from dataproto.errors import InvalidConfig, NonFiniteLogits, RequestFailed, RowCountMismatch
from dataproto.vlm import family_of, media_grids
from helpers.batches import padded_log_probs, prompt_batch
from helpers.shown_models import HF_ENGINE_TYPES
from helpers.tiny_models import (
    MODEL_TYPES,
    VLM_TYPES,
    forward_inputs,
    forward_positions,
    tiny_config,
    tiny_model,
)
from rollout.engine import Completion, SamplingParams
from rollout.hf import HFEngine
from rollout.pretrained import end_ids, generation_config
from rollout.responses import attach_responses, build_requests, order_completions
from rollout.sampling import policy_log_probs, project, sample
from workers.model.logprobs import token_log_probs
from workers.model.named_weights import float32_weights

CPU = torch.device("cpu")


def test_half_precision_engines_and_actors_score_by_one_policy(tmp_path, monkeypatch):
    """From the same hidden states, in float32; logits around 20 rounded to bfloat16 would be off by up to 1/16."""
    model = tiny_model("qwen2_5_vl")
    model.lm_head.weight.data *= 12
    model.save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), dtype="bfloat16", device=CPU)
    states, steps = [], []
    monkeypatch.setattr(
        "rollout.hf.engine.project", lambda hidden, *rest: states.append(hidden) or project(hidden, *rest)
    )
    monkeypatch.setattr("rollout.hf.engine.sample", lambda *given: steps.append(sample(*given)) or steps[-1])
    generate(engine, SamplingParams(n=4, temperature=0.7, max_tokens=8, seed=1))
    hidden, (tokens, found) = torch.cat(states), map(torch.cat, zip(*steps, strict=True))
    head = engine.model.lm_head.weight
    expected, _ = token_log_probs(hidden, head, tokens, temperature=0.7, banned_ids=engine.banned_ids)
    assert hidden.dtype == head.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    rounded = policy_log_probs(engine.model.lm_head(hidden), 0.7, engine.banned_ids).gather(1, tokens[:, None])[:, 0]
    assert (rounded - expected).abs().max() > 1e-2


@pytest.fixture(
    scope="module",
    params=[each if each in MODEL_TYPES else pytest.param(each, marks=pytest.mark.long) for each in HF_ENGINE_TYPES],
)
def engine(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return HFEngine(str(path), device=CPU)


def prompts_for(engine):
    return prompt_batch(engine.model.config, [[(4, 6), (8, 4)], [(6, 6)], []], texts=[4, 7, 3])


def generate(engine, sampling, prompts=None):
    prompts = prompts_for(engine) if prompts is None else prompts
    completions = list(engine.generate(build_requests(prompts, sampling), sampling))
    return attach_responses(prompts, completions, sampling, engine.family, pad_token_id=0)


def test_greedy_tokens_equal_a_loop_without_cache(engine):
    prompts = prompts_for(engine)
    data = generate(engine, SamplingParams(temperature=0, max_tokens=4), prompts)
    banned = torch.tensor(engine.banned_ids, dtype=torch.int64)
    for row in range(len(prompts)):
        kept = prompts["attention_mask"][row].bool()
        ids, types = prompts["input_ids"][row, kept], prompts["mm_token_type_ids"][row, kept].int()
        for _ in range(4):
            with torch.no_grad():
                logits = engine.model(
                    input_ids=ids[None],
                    attention_mask=torch.ones_like(ids)[None],
                    use_cache=False,
                    **forward_inputs(engine.model, types[None], prompts["multi_modal_inputs"][row]),
                ).logits[0, -1]
            token = logits.index_fill(0, banned, -torch.inf).argmax()
            ids, types = torch.cat([ids, token[None]]), torch.cat([types, types.new_zeros(1)])
        assert data["responses"][row].tolist() == ids[-4:].tolist()


def test_log_probs_and_positions_are_those_of_a_whole_forward(engine):
    sampling = SamplingParams(n=3, temperature=0.7, top_p=0.9, top_k=50, max_tokens=5, seed=1)
    data = generate(engine, sampling)
    assert len(data) == 9
    with torch.no_grad():
        expected = padded_log_probs(engine.model, data, temperature=0.7)
    torch.testing.assert_close(data["rollout_log_probs"], expected, atol=2e-5, rtol=0)
    config, family = engine.model.config, family_of(engine.model.config)
    grids = media_grids(data["multi_modal_inputs"])
    whole = family.position_ids(data["mm_token_type_ids"], data["attention_mask"], **grids, config=config)
    kept = data["attention_mask"].bool()
    assert torch.equal(forward_positions(data["position_ids"])[..., kept], forward_positions(whole)[..., kept])


def test_samples_do_not_depend_on_the_batch_around_them(engine):
    prompts, sampling = prompts_for(engine), SamplingParams(n=2, max_tokens=6, seed=5)
    together = generate(engine, sampling, prompts)
    alone = generate(engine, sampling, prompts[1:2])
    assert torch.equal(together["responses"][2:4], alone["responses"])
    assert not torch.equal(alone["responses"][0], alone["responses"][1])
    other_seed = generate(engine, SamplingParams(n=2, max_tokens=6, seed=6), prompts)
    assert not torch.equal(together["responses"], other_seed["responses"])


def test_waves_make_no_difference(engine, monkeypatch):
    sampling = SamplingParams(n=3, max_tokens=4, seed=2)
    whole = generate(engine, sampling)
    monkeypatch.setattr(engine, "max_num_seqs", 2)
    assert torch.equal(generate(engine, sampling)["responses"], whole["responses"])


def test_stop_tokens_end_a_row_and_finished_rows_leave_the_batch(engine):
    free = generate(engine, SamplingParams(n=2, max_tokens=6, seed=3))
    stop = int(free["responses"][0, 2])
    data = generate(engine, SamplingParams(n=2, max_tokens=6, seed=3, stop_token_ids=(stop,)))
    for row in range(len(data)):
        tokens = free["responses"][row].tolist()
        length = tokens.index(stop) + 1 if stop in tokens else 6
        assert data["responses"][row].tolist() == tokens[:length] + [0] * (6 - length)
        assert data["response_mask"][row].tolist() == [1] * length + [0] * (6 - length)
        assert data["attention_mask"][row, -6:].tolist() == data["response_mask"][row].tolist()
        assert bool(data["truncated"][row]) == (stop not in tokens)


def test_an_end_token_at_full_length_does_not_truncate(engine):
    free = generate(engine, SamplingParams(max_tokens=3, seed=3))
    assert free["truncated"].tolist() == [token not in engine.end_ids for token in free["responses"][:, -1].tolist()]
    last = tuple(free["responses"][:, -1].tolist())
    ended = generate(engine, SamplingParams(max_tokens=3, seed=3, stop_token_ids=last))
    assert not ended["truncated"].any()


def test_media_tokens_are_never_sampled(engine):
    hot = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    head = dict(engine.model.named_parameters())["lm_head.weight"]
    with torch.no_grad():
        head[list(engine.banned_ids)] = 0  # logits 0 where the others are pushed far down
        head[[i for i in range(len(head)) if i not in engine.banned_ids]] *= 0.01
    data = generate(engine, SamplingParams(n=4, temperature=3.0, max_tokens=8))
    engine.load_weights(hot.items())
    assert not np.isin(data["responses"].numpy(), engine.banned_ids).any()


def test_new_weights_are_used_and_strangers_refused(engine):
    sampling = SamplingParams(temperature=0, max_tokens=4)
    original = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    before = generate(engine, sampling)
    engine.load_weights((name, weight.flip(0)) for name, weight in original.items())
    changed = generate(engine, sampling)
    engine.load_weights(original.items())
    assert not torch.equal(before["rollout_log_probs"], changed["rollout_log_probs"])
    assert torch.equal(before["rollout_log_probs"], generate(engine, sampling)["rollout_log_probs"])
    with pytest.raises(InvalidConfig, match="'nonsense'"):
        engine.load_weights([("nonsense", torch.zeros(1))])


def test_all_weights_are_needed_and_missing_ones_are_named(engine):
    original = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    names = list(original)
    with pytest.raises(InvalidConfig, match=rf"{len(names) - 1} weights that were not given: .*'lm_head.weight'"):
        engine.load_weights([(names[0], original[names[0]])])
    assert not engine.wake()  # so a sharding manager streams them again
    with pytest.raises(InvalidConfig, match=r"'lm_head.weight' \(3, 64\) does not fit .*its shape is"):
        engine.load_weights((original | {"lm_head.weight": torch.zeros(3, 64)}).items())
    adapters = {f"{names[0]}.lora_A.default.weight": torch.zeros(1)}
    with pytest.raises(InvalidConfig, match=r"lora_A.*no such parameter"):
        engine.load_weights((original | adapters).items())
    with pytest.raises(InvalidConfig, match=f"'{names[0]}' was given twice with different values"):
        engine.load_weights([*original.items(), (names[0], original[names[0]] + 1)])
    engine.load_weights(original.items())
    assert engine.wake()
    assert differing_weights(engine, original.items()) == []


def test_tied_weights_are_needed_under_one_name(tmp_path):
    config = tiny_config("qwen2_vl")
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = True
    tiny_model("qwen2_vl", config=config).save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), device=CPU)
    once = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    every = {name: weight.clone() for name, weight in engine.model.named_parameters(remove_duplicate=False)}
    (tied,) = every.keys() - once.keys()
    engine.load_weights(once.items())
    engine.load_weights(every.items())
    other = next(name for name, weight in once.items() if weight.shape == every[tied].shape)
    engine.load_weights((name, weight) for name, weight in every.items() if name != other)
    with pytest.raises(InvalidConfig, match=f"'{tied}' was given twice with different values"):
        engine.load_weights((every | {tied: every[tied] + 1}).items())


@pytest.mark.parametrize(
    ("bad", "sampling"),
    [
        (torch.nan, SamplingParams(temperature=0, max_tokens=4)),
        (torch.inf, SamplingParams(n=2, max_tokens=4, seed=5)),
        (-torch.inf, SamplingParams(n=2, top_p=0.5, top_k=9, max_tokens=4)),
    ],
)
def test_logits_that_are_not_finite_name_the_row_and_new_weights_mend_it(engine, bad, sampling):
    weights = {name: weight.clone() for name, weight in engine.model.named_parameters()}
    before = generate(engine, sampling)
    head = weights["lm_head.weight"].clone()
    head[7] = bad
    engine.load_weights((weights | {"lm_head.weight": head}).items())
    with pytest.raises(
        NonFiniteLogits, match=r"row \d \(uid prompt-\d\): the logits of response token \d are not finite"
    ):
        generate(engine, sampling)
    engine.load_weights(weights.items())
    after = generate(engine, sampling)
    assert torch.equal(before["responses"], after["responses"])
    assert torch.equal(before["rollout_log_probs"], after["rollout_log_probs"])


@pytest.mark.parametrize("engine", VLM_TYPES, indirect=True)
def test_a_row_whose_logits_are_not_finite_is_named_among_others(engine, monkeypatch):
    prompts, sampling = prompts_for(engine), SamplingParams(n=2, max_tokens=3, seed=4)
    expected = generate(engine, sampling, prompts)
    broken = prompts[:]
    pixels = {
        name: value * torch.nan if "pixel" in name else value for name, value in broken["multi_modal_inputs"][1].items()
    }
    broken["multi_modal_inputs"] = np.array([prompts["multi_modal_inputs"][0], pixels, {}], dtype=object)
    for size in (256, 2):  # in one wave, and in waves of their own
        monkeypatch.setattr(engine, "max_num_seqs", size)
        with pytest.raises(NonFiniteLogits, match=r"row 1 \(uid prompt-1\)"):
            generate(engine, sampling, broken)
    assert torch.equal(generate(engine, sampling, prompts)["responses"], expected["responses"])


def test_without_generation_settings_both_engines_end_as_the_config_says(tmp_path):
    config = tiny_config("qwen2_5_vl")
    config.text_config.eos_token_id = 7
    tiny_model("qwen2_5_vl", config=config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    engine = HFEngine(str(tmp_path), device=CPU)
    assert end_ids(generation_config(str(tmp_path), engine.model.config)) == engine.end_ids == (7,)


def test_generation_settings_without_an_end_token_leave_that_of_the_config(tmp_path):
    """Without an end token every response ran to its greatest length."""
    config = tiny_config("qwen2_5_vl")
    config.text_config.eos_token_id = 7
    tiny_model("qwen2_5_vl", config=config).save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"num_beams": 4, "repetition_penalty": 5.0, "max_length": 5}')
    assert HFEngine(str(tmp_path), device=CPU).end_ids == (7,)


@pytest.mark.parametrize("text", ["{broken", "[]"])
def test_damaged_generation_settings_are_named(tmp_path, text):
    tiny_model("qwen2_5_vl").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(InvalidConfig, match=r"generation_config\.json cannot be read"):
        HFEngine(str(tmp_path), device=CPU)


def test_media_objects_are_shared_not_copied(engine):
    prompts = prompts_for(engine)
    data = generate(engine, SamplingParams(n=2, max_tokens=2), prompts)
    assert data["multi_modal_inputs"][0] is data["multi_modal_inputs"][1] is prompts["multi_modal_inputs"][0]


TWO_ROWS = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})


def test_a_completion_that_ended_otherwise_is_named_by_its_row():
    done = [Completion(number, [1], [0.0], "abort" if number == 3 else "length") for number in range(4)]
    with pytest.raises(RequestFailed, match=r"^row 1 \(uid b\) ended by 'abort'"):
        order_completions(done, TWO_ROWS, SamplingParams(n=2))


def test_lost_and_doubled_completions_are_named_by_their_rows():
    sampling = SamplingParams(n=2)
    done = [Completion(number, [1], [0.0], "stop") for number in range(4)]
    with pytest.raises(RowCountMismatch, match=r"nothing for row 1 \(uid b\) \(2 of 4 requests\)"):
        order_completions(done[:2], TWO_ROWS, sampling)
    with pytest.raises(RowCountMismatch, match=r"^row 1 \(uid b\): the engine returned request 2 twice"):
        order_completions([done[2], done[2]], TWO_ROWS, sampling)
    with pytest.raises(RowCountMismatch, match="request 4, but there are 4"):
        order_completions([Completion(4, [1], [0.0], "stop")], TWO_ROWS, sampling)


@pytest.mark.parametrize("model_type", ["qwen3_5", "minicpmv4_6"])
def test_weights_that_are_used_in_float32_are_not_rounded(model_type, tmp_path):
    """In bfloat16 transformers rounds the decays of recurrent layers, which the actor keeps: their policies would differ."""
    model = tiny_model(model_type)
    exact = float32_weights(model, family_of(model.config))
    for weight in exact:
        torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    engine = HFEngine(str(tmp_path), dtype="bfloat16", device=CPU)
    kept = {name: weight for name, weight in engine.model.named_parameters() if weight.dtype == torch.float32}
    assert len(kept) == len(exact) == 2
    assert all(torch.equal(weight, model.get_parameter(name)) for name, weight in kept.items())
    trained = {name: weight + 1e-4 for name, weight in model.named_parameters()}
    engine.load_weights(trained.items())
    assert all(torch.equal(weight, trained[name]) for name, weight in kept.items())
    assert type(engine.model).__name__ == type(model).__name__
    assert generate(engine, SamplingParams(temperature=0, max_tokens=3))["responses"].shape[1] == 3

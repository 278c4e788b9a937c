"""Updates that are not made, because the gradient is not finite: clients are told, and the run goes on."""

import numpy as np
import pytest
import tinker
from tinker import RequestFailedError

from dataproto.errors import InvalidConfig
from helpers.fronts import Front, Recording, drive

LARGE = 1e38  # the square of a gradient is infinite


def test_an_update_that_is_not_made_says_so_and_is_left_out_of_a_replay_too(tmp_path):
    async def work(front: Front):
        run = await front.new_run("r")
        first = front.backend.models["r"].weights.copy()
        for seq in (1, 2):
            await front.result(await front.submit(run, seq, 7, weight=LARGE))
        told = await front.result(await front.submit(run, 3, None))
        assert told["category"] == "user"
        assert told["error"].startswith(
            "no update was made, and the gradients are dropped: together they have the norm inf"
        )
        assert (front.backend.models["r"].weights == first).all()
        await front.result(await front.submit(run, 4, 7))
        found = (await front.result(await front.submit(run, 5, None)))["metrics"]
        weights = front.backend.models["r"].weights
        assert found["steps"] == 1
        fresh = await front.lose_engine()
        await front.result(await front.submit(run, 6, 7))
        assert (fresh.models["r"].weights == weights).all()
        assert (weights != first).any()

    drive(work, tmp_path, snapshot_steps=100)


def test_gradients_of_an_update_that_was_refused_stay_also_in_a_replay(tmp_path, monkeypatch):
    """By the front process, which reads the settings, and by the engine."""

    def step(self, model_id, adam, steps=Recording.optim_step):
        if adam.learning_rate > 1:
            raise InvalidConfig("float32 does not hold it")
        return steps(self, model_id, adam)

    monkeypatch.setattr(Recording, "optim_step", step)

    async def work(front: Front):
        run = await front.new_run("r")
        await front.result(await front.submit(run, 1, 7))
        for seq, rate in ((2, 1e300), (3, 1e38)):
            told = await front.result(await front.request(run, seq, "optim_step", adam_params={"learning_rate": rate}))
            assert told["category"] == "user"
            assert "float32" in told["error"]
        await front.result(await front.submit(run, 4, 8))
        found = (await front.result(await front.submit(run, 5, None)))["metrics"]
        twin = await front.new_run("twin")
        for seq, token in ((1, 7), (2, 8)):
            await front.result(await front.submit(twin, seq, token))
        assert (await front.result(await front.submit(twin, 3, None)))["metrics"] == found
        weights = front.backend.models["r"].weights
        fresh = await front.lose_engine()
        await front.result(await front.submit(run, 6, 7))
        assert (fresh.models["r"].weights == weights).all()

    drive(work, tmp_path, snapshot_steps=100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_sdk_raises_what_is_wrong_with_a_gradient_and_trains_on(tiny_server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")

    def datum(weight: float) -> tinker.Datum:
        inputs = {"target_tokens": [6, 7, 8, 9], "weights": np.full(4, weight, np.float32)}
        return tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs=inputs)

    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        client = service.create_lora_training_client("tiny", rank=4, seed=1).result()

        def stepped(*weights: float) -> dict[str, float]:
            passes = [client.forward_backward([datum(each)], "cross_entropy") for each in weights]
            update = client.optim_step(tinker.AdamParams(learning_rate=1e-3))
            for each in passes:
                each.result(timeout=60)
            return update.result(timeout=60).metrics

        most = 1.5e19 / stepped(1)["grad_norm"]
        with pytest.raises(RequestFailedError, match="the gradient of rows 0 to 1 together is not finite"):
            client.forward_backward([datum(1), datum(1e30)], "cross_entropy").result(timeout=60)
        with pytest.raises(RequestFailedError, match="no update was made"):
            stepped(most, most)
        assert stepped(1)["skipped_steps"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_settings_that_float32_does_not_hold_are_refused_and_change_nothing(tiny_server, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    inputs = {"target_tokens": [6, 7, 8, 9], "weights": [1.0] * 4}
    data = [tinker.Datum(model_input=tinker.ModelInput.from_ints([5, 6, 7, 8]), loss_fn_inputs=inputs)]
    wrong = (
        ({"learning_rate": 1e300}, r"learning_rate=1e\+300: must be at most 3.40282e\+38"),
        ({"learning_rate": 1e38}, r"learning_rate=1e\+38, eps=1e-12 and weight_decay=0 can leave numbers that"),
        ({"eps": 1e300}, r"eps=1e\+300: must be at most"),
        ({"weight_decay": 1e300}, r"weight_decay=1e\+300: must be at most"),
        ({"learning_rate": 1e30, "weight_decay": 1e30}, "float32 does not hold"),
        ({"learning_rate": float("inf")}, r"got `null` - at `\$.adam_params.learning_rate`"),
    )
    with tinker.ServiceClient(base_url=tiny_server.url, api_key=tiny_server.key) as service:
        found = []
        for mistakes in (wrong, ()):
            client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
            client.forward_backward(data, "cross_entropy").result(timeout=60)
            for settings, message in mistakes:
                with pytest.raises(RequestFailedError, match=message) as refused:
                    client.optim_step(tinker.AdamParams(**settings)).result(timeout=60)
                assert refused.value.category.value == "user"
            stepped = client.optim_step(tinker.AdamParams(learning_rate=1e-2)).result(timeout=60).metrics
            found.append((stepped, client.forward(data, "cross_entropy").result(timeout=60).metrics))
        assert found[0] == found[1]

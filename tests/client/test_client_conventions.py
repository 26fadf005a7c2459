"""Both ways in which ART's documentation writes a training loop, word for word but for the import."""

from __future__ import annotations

from typing import Any

import pytest
from client_fake_server import FakeServer

import art_sky as art
from art_sky.client.http_backend import HttpBackend
from art_sky.errors import InvalidInput


async def rollout(model: art.TrainableModel[Any], scenario: str, step: int | None = None) -> art.Trajectory:
    client = model.openai_client()
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "system", "content": "You answer with one word."}],
        reward=0,
        metadata={"scenario": scenario},
    )
    trajectory.messages_and_choices.append({"role": "user", "content": scenario})
    async with trajectory.track_duration("llm"):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(step), messages=trajectory.messages()
        )
    choice = completion.choices[0]
    trajectory.messages_and_choices.append(choice)
    trajectory.reward = len(choice.message.content or "") / 10 + len(scenario)
    trajectory.metrics["turns"] = 1
    return trajectory.finish()


async def test_the_convention_of_2025(server: FakeServer, backend: HttpBackend) -> None:
    model = art.TrainableModel(name="agent-001", project="yes-no-maybe", base_model="smollm2-135m")
    await model.register(backend)

    for _ in range(await model.get_step(), 2):
        train_groups = await art.gather_trajectory_groups(
            (art.TrajectoryGroup(rollout(model, scenario) for _ in range(3)) for scenario in ("a", "bb")),
            pbar_desc="gather",
            max_exceptions=2,
        )
        await model.delete_checkpoints()
        await model.train(train_groups, config=art.TrainConfig(learning_rate=1e-5))
    await model.log(train_groups, split="val")

    assert await model.get_step() == 2
    row = server.rows["yes-no-maybe/agent-001", 2, "train"]
    assert row["loss"] == 0.5 and row["reward"] == pytest.approx(0.7 + 1.5) and row["turns"] == 1
    assert row["trajectories"] == 6 and row["exception_rate"] == 0 and row["reward_std_dev"] == 0
    assert row["reward_std_dev_overall"] == pytest.approx(0.5)
    assert set(row) > {"duration", "llm_duration"}
    assert ("yes-no-maybe/agent-001", 2, "val") in server.rows
    trained = [entry["train"] for entry in server.logged if "train" in entry]
    assert len({t["request_id"] for t in trained}) == 2
    assert trained[0]["config"]["learning_rate"] == 1e-5
    groups = server.batch(trained[0]["batch"])
    assert len(groups) == 2 and len(groups[0]["trajectories"]) == 3
    system, user, choice = groups[0]["trajectories"][0]["messages_and_choices"]
    assert (system["role"], user["content"]) == ("system", "a")
    assert choice["token_ids"] == [7, 8, 0] and choice["prompt_token_ids"] == [0, 1]
    assert choice["message"]["reasoning_content"] == "hm"


async def test_the_convention_of_0_5_23(server: FakeServer, backend: HttpBackend) -> None:
    model = art.TrainableModel(name="agent", run_name="agent-run-7", project="p", base_model="smollm2-135m")
    await model.register(backend)

    groups = await art.gather_trajectory_groups(
        art.TrajectoryGroup(rollout(model, s) for _ in range(2)) for s in ("a", "bb")
    )
    result = await backend.train(model, groups, learning_rate=5e-6, loss_fn="cispo", beta=0.01)
    await model.log(groups, metrics=result.metrics, step=result.step, split="train")
    await model.log(groups, metrics=result.metrics, step=result.step, split="train")

    assert (result.step, result.checkpoint_path) == (1, "manifests/1")
    assert list(server.rows) == [("p/agent-run-7", 1, "train")]
    assert server.rows["p/agent-run-7", 1, "train"]["loss"] == 0.5
    sent = server.logged[0]["train"]["config"]
    assert (sent["learning_rate"], sent["loss_fn"], sent["kl_penalty_coef"]) == (5e-6, "cispo", 0.01)
    # the groups that were trained are the ones that were logged, sent once
    puts = [path for method, path in server.calls if method == "PUT"]
    assert len(puts) == 1 and puts[0].endswith(server.logged[1]["log"]["batch"])


async def test_a_step_can_be_asked_for(server: FakeServer, model: art.TrainableModel[Any]) -> None:
    assert model.get_inference_name() == "agent" and model.get_inference_name(step=3) == "agent@3"
    done = await rollout(model, "x", step=0)
    choice: Any = done.messages_and_choices[-1]
    assert choice.sampling["model"] == "agent@0"
    params = model.litellm_completion_params(step=0)
    assert params == {
        "model": "hosted_vllm/agent@0",
        "base_url": f"{server.base_url}/v1",
        "api_key": model.inference_api_key,
    }
    assert model.openai_client() is model.openai_client()


async def test_rollouts_by_address(server: FakeServer, model: art.TrainableModel[Any]) -> None:
    import openai

    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with model.rollout() as r:
        with pytest.raises(InvalidInput, match="no trajectory yet"):
            _ = r.trajectory
        async with openai.AsyncOpenAI(base_url=r.base_url, api_key=r.api_key, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "one"}]
            first = await client.chat.completions.create(model="agent", messages=messages)
            # what agents send back: without reasoning_content, and with fields of their client
            messages += [{"role": "assistant", "content": first.choices[0].message.content, "refusal": None}]
            messages += [{"role": "user", "content": "two"}]
            await client.chat.completions.create(model="agent", messages=messages)
            await client.chat.completions.create(model="agent", messages=[messages[0]], tools=tools)
        r.reward = 0.75
        r.metrics["won"] = True
    trajectory = r.trajectory
    assert trajectory.reward == 0.75 and trajectory.metrics == {"won": True}
    assert [m["role"] for m in trajectory.messages()] == ["user", "assistant", "user", "assistant"]
    assert trajectory.messages()[1]["reasoning_content"] == "hm"
    (other,) = trajectory.additional_histories
    assert other.tools == tools and len(other.messages()) == 2
    assert server.open_rollouts == {}
    r.reward = 1
    assert trajectory.reward == 1
    with pytest.raises(InvalidInput, match="not a finite number"):
        r.reward = float("nan")
    await model.train([art.TrajectoryGroup([trajectory])])
    assert len(server.batch(server.logged[0]["train"]["batch"])) == 1


@pytest.mark.parametrize("later_calls", [0, 1])
async def test_a_rollout_whose_machine_was_replaced_says_that_calls_are_lost(
    server: FakeServer, model: art.TrainableModel[Any], later_calls: int
) -> None:
    import openai

    async with model.rollout() as r:
        client = openai.AsyncOpenAI(base_url=r.base_url, api_key=r.api_key, max_retries=0)
        for n in range(1 + later_calls):
            await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": str(n)}])
            if n == 0:
                server.replaced = True
                server.exchanges.clear()
        await client.close()
    assert r.trajectory.metrics == {"lost_exchanges": True} and "replaced" in r.trajectory.logs[-1]
    assert len(r.trajectory.messages()) == 2 * later_calls
    await model.train([art.TrajectoryGroup([r.trajectory])])
    (row,) = server.batch(server.logged[0]["train"]["batch"])
    assert row["trajectories"][0]["metrics"] == {"lost_exchanges": True}, "and it is seen where it is trained"


async def test_a_rollout_that_raises_closes_its_address(
    server: FakeServer, model: art.TrainableModel[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(LookupError):
        async with model.rollout() as r:
            raise LookupError
    assert server.open_rollouts == {}
    async with model.rollout() as r:
        pass
    assert r.trajectory.messages_and_choices == [] and "no call reached" in caplog.text


async def test_prompted_models_are_logged_in_the_same_place(server: FakeServer, backend: HttpBackend) -> None:
    model: art.Model[None] = art.Model(
        name="gpt", project="p", inference_model_name="gpt-x", inference_base_url=f"{server.base_url}/v1",
        inference_api_key="secret-token",
    )  # fmt: skip
    await model.register(backend)
    assert server.models["p/gpt"]["trainable"] is False and server.models["p/gpt"]["base_model"] == "gpt-x"
    server.drop_fields = True  # another provider's choices carry no tokens, and need none
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[{"role": "user", "content": "hi"}]
    )
    t = art.Trajectory(messages_and_choices=[{"role": "user", "content": "hi"}, completion], reward=1)
    await model.log([t], split="val", metrics={"seconds": 2, "broken": float("nan")})
    assert server.rows["p/gpt", 0, "val"] | {"seconds": 2, "broken": None} == server.rows["p/gpt", 0, "val"]
    assert server.rows["p/gpt", 0, "val"]["reward"] == 1

"""The main job with a real language model. Minutes long."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import art_sky as art
from art_sky.demo import DemoOptions, StepRow, run_demo

TOPICS = ["the sea", "a clock", "bread", "winter", "trains", "a garden", "music", "the moon", "paper", "salt"]


class Quiet:
    def phase(self, text: str, done: int = 0, total: int | None = None, in_bytes: bool = False) -> None: ...
    def note(self, text: str) -> None: ...
    def step(self, row: StepRow) -> None: ...
    def validation(self, step: int, reward: float) -> None: ...


@pytest.mark.slow
def test_the_demo_learns(tmp_path: Path) -> None:
    """The figures that the README's first command promises, on a seed that nothing was chosen by."""
    result = run_demo(DemoOptions(store=str(tmp_path / "run"), seed=3), Quiet())
    assert result.validation["samples"] >= 128
    assert result.validation["before"] < 0.3
    assert result.validation["after"] >= 0.85
    rewards = [row.reward or 0.0 for row in result.steps]
    assert 10 <= len(rewards) <= 20
    assert sum(rewards[-3:]) / 3 >= 0.9
    assert result.head["step"] == len(rewards)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demo_learns_by_trls_trainer_too(tmp_path: Path) -> None:
    result = run_demo(DemoOptions(store=str(tmp_path / "run"), trainer="trl"), Quiet())
    assert result.validation["before"] < 0.3
    assert result.validation["after"] >= 0.8


@pytest.mark.unsloth
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="needs Unsloth; `make test-unsloth`")
def test_the_demo_learns_on_a_model_that_unsloth_loads(tmp_path: Path) -> None:
    result = run_demo(DemoOptions(store=str(tmp_path / "run"), trainer="unsloth"), Quiet())
    assert result.validation["before"] < 0.3
    assert result.validation["after"] >= 0.8


@pytest.mark.slow
def test_the_demo_goes_on_in_another_folder(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for folder, steps in (("here", 2), ("elsewhere", 3)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        results.append(run_demo(DemoOptions(store=bucket, steps=steps), Quiet()))
    first, second = results
    assert [row.step for row in second.steps] == [1, 2, 3]
    assert second.steps[:2] == first.steps
    assert second.validation["before"] == first.validation["before"]
    assert second.head["step"] == 3


@pytest.mark.slow
def test_the_readmes_example_runs(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "get_step() < 10" in c)
    script = tmp_path / "agent.py"
    script.write_text(code.replace("get_step() < 10", "get_step() < 2"))
    for steps in (["1", "2"], []):  # the second time there is nothing left to do
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert [line.split()[0] for line in done.stdout.splitlines()] == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "absolute", "signed", "k3"), [("bfloat16", 0.06, 0.01, 0.005), ("float32", 1e-4, 1e-4, 1e-4)]
)
async def test_the_trainer_finds_the_samplers_logprobs(
    dtype: str, absolute: float, signed: float, k3: float, tmp_path: Path
) -> None:
    """1,000 tokens of free text at each temperature, sampled and trained with the same, trained weights."""
    async with art.LocalBackend(tmp_path / "run", engine=art.EngineConfig(dtype=dtype)) as backend:
        model = art.TrainableModel(name="writer", project="tests", base_model="smollm2-135m")
        await model.register(backend)
        seen = []
        for step, temperature in enumerate((1.0, 0.7, 1.0, 1.3)):

            async def write(topic: str, seed: int, temperature: float = temperature) -> art.Trajectory:
                messages = [{"role": "user", "content": f"Write about {topic}."}]
                completion = await model.openai_client().chat.completions.create(
                    model=model.get_inference_name(),
                    messages=messages,
                    max_tokens=60,
                    temperature=temperature,
                    seed=seed,
                )
                choice = completion.choices[0]
                return art.Trajectory(
                    messages_and_choices=[*messages, choice], reward=len(choice.message.content or "")
                )

            groups = [art.TrajectoryGroup(write(t, 100 * step + i) for i in range(2)) for t in TOPICS]
            groups = await art.gather_trajectory_groups(groups, pbar_desc=None)
            for i, group in enumerate(groups):
                group.trajectories[0].reward += i + 1  # so that no group is without a spread
            result = await model.train(groups, config=art.TrainConfig(learning_rate=1e-3))
            seen.append(result.metrics)
    for metrics in seen[1:]:  # the first step made the weights differ from the base model's
        assert metrics["data/tokens_trained"] >= 1000
        assert metrics["policy/sampler_mismatch_abs"] < absolute
        assert abs(metrics["policy/sampler_mismatch_mean"]) < signed
        assert metrics["policy/sampler_mismatch_k3"] < k3
    print([{k: v for k, v in m.items() if "mismatch" in k or k == "data/tokens_trained"} for m in seen])

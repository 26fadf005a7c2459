"""The tic-tac-toe example: its game and rollout here, the whole training run as a slow test."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

FOLDER = Path(__file__).parents[2] / "examples" / "tic_tac_toe"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    import tic_tac_toe

    yield tic_tac_toe
    for name in ("tic_tac_toe", "warmup"):
        sys.modules.pop(name, None)


def test_games_end_with_the_right_reward(example: Any) -> None:
    rewards = set()
    for seed in range(300):
        chance, game = random.Random(seed), example.Game(seed)
        while game.reward is None:
            assert game.show() == "".join(str(i) if i in game.free() else c for i, c in enumerate(game.show()))
            game.play(str(chance.choice(game.free())))
        rewards.add(game.reward)
    assert rewards == {example.WIN, example.DRAW, example.LOSS}


@pytest.mark.parametrize("move", ["", "9", "x", "00", "4 ", "-1", "12"])
def test_anything_but_a_free_cell_is_illegal(example: Any, move: str) -> None:
    game = example.Game(0)
    game.play(move)
    assert game.reward == example.ILLEGAL


def test_a_taken_cell_is_illegal(example: Any) -> None:
    game = example.Game(0)
    game.play("4")
    game.play("4")
    assert game.reward == example.ILLEGAL


async def test_rollout_collects_every_turn(example: Any) -> None:
    class Agent:
        """Answers with the first free cell."""

        def __init__(self) -> None:
            self.chat = SimpleNamespace(completions=self)
            self.seeds: list[int] = []

        async def create(self, *, messages: list[dict[str, Any]], seed: int, **_: Any) -> ChatCompletion:
            self.seeds.append(seed)
            move = next(c for c in messages[-1]["content"] if c.isdigit())
            message = {"role": "assistant", "content": move}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            return ChatCompletion.model_validate(
                {"id": "c", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
            )

    agent = Agent()
    model = SimpleNamespace(openai_client=lambda: agent, get_inference_name=lambda: "m")
    trajectory = await example.rollout(model, seed=3, sampling_seed=100)
    turns = int(trajectory.metrics["turns"])
    assert len(trajectory.messages_and_choices) == 2 * turns
    assert agent.seeds == [100 + i for i in range(turns)]
    assert trajectory.reward in (example.WIN, example.DRAW, example.LOSS) and not trajectory.metrics["illegal"]


def test_warm_up_dialogues(example: Any) -> None:
    import warmup

    tokenizer = warmup.make_tokenizer()
    messages = warmup.play_randomly(random.Random(0))
    ids, labels = warmup.encode(tokenizer, messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    learnt = tokenizer.decode([i for i, label in zip(ids, labels, strict=True) if label != -100])
    assert learnt.count("<|im_end|>\n") == len(messages) // 2, "the line break after an answer is not learnt"


@pytest.mark.slow
def test_it_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "train.py"), "--store", str(tmp_path), "--json"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=1100, cwd=tmp_path, check=True)
    result = json.loads(out.stdout)
    assert result["games"] == 400 and result["rise"] >= 0.3

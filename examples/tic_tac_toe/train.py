"""Trains the agent of tic_tac_toe.py on this machine.

    python examples/tic_tac_toe/train.py [--steps N] [--seed N] [--store FOLDER] [--json]

Run again with the same seed it goes on from the newest step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

from tic_tac_toe import rollout
from warmup import make_base_model

import art_sky as art

GROUPS, GAMES_A_GROUP = 8, 8
EVALUATION_GAMES = 400
EVALUATION_SEED = 10**9  # opponents that training never meets


async def main(options: argparse.Namespace) -> dict[str, object]:
    began = time.monotonic()
    base = make_base_model(options.store / "tic-tac-toe-base")
    say(f"base model ready after {time.monotonic() - began:.0f} s")
    engine = art.EngineConfig(dtype="float32")  # a model this small is not faster in bfloat16
    async with art.LocalBackend(path=options.store, engine=engine) as backend:
        model = art.TrainableModel(
            project="tic-tac-toe", name=f"agent-{options.seed}", base_model=str(base), lora=art.LoRAConfig(rank=8)
        )
        await model.register(backend)
        before = await evaluate(model, options.seed)
        config = art.TrainConfig(learning_rate=options.learning_rate, loss_fn=options.loss)
        for step in range(await model.get_step(), options.steps):
            # The games of a group meet the same opponent, so that only the agent's own choices differ.
            groups = await art.gather_trajectory_groups(
                (
                    art.TrajectoryGroup(
                        rollout(model, opponent, sampling_seed=opponent * 100 + 10 * game)
                        for game in range(GAMES_A_GROUP)
                    )
                    for opponent in opponents(options.seed, step)
                ),
                pbar_desc=None,
            )
            result = await model.train(groups, config)
            say(f"step {result.step}: mean reward {result.metrics['reward']:.3f}, {time.monotonic() - began:.0f} s")
        after = await evaluate(model, options.seed)
        step = await model.get_step()
    return {
        "before": before,
        "after": after,
        "rise": round(after["reward"] - before["reward"], 3),
        "games": EVALUATION_GAMES,
        "step": step,
        "seconds": round(time.monotonic() - began, 1),
    }


async def evaluate(model: art.TrainableModel, seed: int) -> dict[str, float]:
    games = range(EVALUATION_SEED, EVALUATION_SEED + EVALUATION_GAMES)
    trajectories = await art.gather_trajectories(
        (rollout(model, game, sampling_seed=seed * 10**6 + 10 * (game - EVALUATION_SEED)) for game in games),
        pbar_desc=None,
        max_concurrency=64,
    )
    await model.log(trajectories, split="val")
    result = {
        "reward": statistics.fmean(t.reward for t in trajectories),
        "won": statistics.fmean(t.metrics["won"] for t in trajectories),
        "illegal": statistics.fmean(t.metrics["illegal"] for t in trajectories),
    }
    say(f"{EVALUATION_GAMES} games: " + ", ".join(f"{k} {v:.3f}" for k, v in result.items()))
    return {k: round(v, 4) for k, v in result.items()}


def opponents(seed: int, step: int) -> list[int]:
    first = seed * 10**6 + step * GROUPS
    return list(range(first, first + GROUPS))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", type=Path, default=Path(".art-sky"))
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--loss", choices=["ppo", "cispo"], default="ppo")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line on stdout")
    given = parser.parse_args()
    outcome = asyncio.run(main(given))
    if given.json:
        print(json.dumps(outcome))
    else:
        print(f"mean reward {outcome['before']['reward']:.3f} -> {outcome['after']['reward']:.3f}")

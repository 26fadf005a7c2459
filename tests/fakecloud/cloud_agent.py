"""What an agent developer runs on the laptop: CLUSTER STEPS [EPOCHS GROUPS]. Rewards digits; one JSON line a step."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import art_sky as art

SIZE = 4


async def rollout(model: art.TrainableModel, task: int, seed: int) -> art.Trajectory:
    client = model.openai_client()
    messages = [{"role": "user", "content": f"Write a number, number {task}."}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=8, seed=seed
    )
    choice = completion.choices[0]
    text = choice.message.content or ""
    reward = sum(c.isdigit() for c in text) / max(len(text), 1)
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward)


async def main(cluster: str, steps: int, epochs: int = 1, groups: int = 1) -> None:
    backend = art.connect(cluster)
    try:
        model = art.TrainableModel(name="agent", project="tests", base_model="smollm2-135m")
        began = time.monotonic()
        await model.register(backend)
        print(json.dumps({"registered": round(time.monotonic() - began, 1)}), flush=True)
        while (step := await model.get_step()) < steps:
            began = time.monotonic()
            rated = await art.gather_trajectory_groups(
                art.TrajectoryGroup(rollout(model, g, step * 1000 + g * SIZE + i) for i in range(SIZE))
                for g in range(groups)
            )
            await model.train(rated, config=art.TrainConfig(learning_rate=1e-5, epochs=epochs))
            print(json.dumps({"step": step + 1, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    finally:
        await backend.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))

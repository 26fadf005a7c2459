"""Tic-tac-toe against a player who moves at random: the game, and the agent's rollout."""

from __future__ import annotations

import random

import art_sky as art

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
WIN, DRAW, LOSS, ILLEGAL = 1.0, 0.0, -0.5, -1.0


class Game:
    """The agent is X and moves first. `reward` is None until the game is over."""

    def __init__(self, seed: int) -> None:
        self._opponent = random.Random(seed)
        self._board = ["."] * 9
        self.reward: float | None = None

    def show(self) -> str:
        """The board as nine characters; a free cell shows its number, which is what the agent answers."""
        return "".join(str(i) if cell == "." else cell for i, cell in enumerate(self._board))

    def free(self) -> list[int]:
        return [i for i, cell in enumerate(self._board) if cell == "."]

    def play(self, move: str) -> None:
        """The agent's move, then the opponent's. Anything but the number of a free cell loses at once."""
        if move not in [str(i) for i in self.free()]:
            self.reward = ILLEGAL
            return
        self._board[int(move)] = "X"
        if self._has_line("X"):
            self.reward = WIN
        elif not self.free():
            self.reward = DRAW
        else:
            self._board[self._opponent.choice(self.free())] = "O"
            if self._has_line("O"):
                self.reward = LOSS

    def _has_line(self, player: str) -> bool:
        return any(all(self._board[i] == player for i in line) for line in LINES)


async def rollout(model: art.TrainableModel, seed: int, sampling_seed: int | None = None) -> art.Trajectory:
    """One game. `seed` is the opponent's; `sampling_seed` makes the agent's own choices repeatable."""
    game = Game(seed)
    client = model.openai_client()
    trajectory = art.Trajectory(messages_and_choices=[], reward=0.0)
    turn = 0
    while game.reward is None:
        trajectory.messages_and_choices.append({"role": "user", "content": game.show()})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(),
            messages=trajectory.messages(),
            max_tokens=3,
            seed=None if sampling_seed is None else sampling_seed + turn,
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        game.play(choice.message.content or "")
        turn += 1
    trajectory.reward = game.reward
    trajectory.metrics |= {"won": game.reward == WIN, "illegal": game.reward == ILLEGAL, "turns": turn}
    return trajectory

"""Makes a base model small enough for this example: 0.6M parameters, taught legal play by supervised steps.

A model that never makes a legal move earns the same reward for every game and learns nothing from it, so a little
supervision comes first: 600 games of random legal moves, 300 steps, well under a minute. The loss covers the boards
too, not only the moves: copying the numbers of the free cells is what the model has to learn.

    python examples/tic_tac_toe/warmup.py [FOLDER]
"""

from __future__ import annotations

import os
import random
import string
import sys
from pathlib import Path

from tic_tac_toe import Game

RECIPE = "1"  # changes when what follows changes, so that an older model in the folder is made again
GAMES, STEPS, BATCH, LEARNING_RATE = 600, 300, 32, 2e-3
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_base_model(folder: Path) -> Path:
    """Returns the folder of the model, which is made when it is not there yet."""
    made = folder / "recipe"
    if made.is_file() and made.read_text() == RECIPE:
        return folder
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the same weights on every machine, and for a model this small hardly slower
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    dialogues = [encode(tokenizer, play_randomly(random.Random(seed))) for seed in range(GAMES)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    draw = random.Random(0)
    for step in range(STEPS):
        batch = draw.sample(dialogues, BATCH)
        length = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([i + [tokenizer.pad_token_id] * (length - len(i)) for i, _ in batch])
        labels = torch.tensor([y + [-100] * (length - len(y)) for _, y in batch])
        mask = torch.tensor([[1] * len(i) + [0] * (length - len(i)) for i, _ in batch])
        loss = model(ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"warm-up step {step}: loss {loss.item():.3f}", file=sys.stderr, flush=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    made.write_text(RECIPE)  # last: a folder without it is made again
    return folder


def make_tokenizer():
    """One token a character, besides the role names and the marks of a turn."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "system", "user", "assistant", "\n", *string.ascii_letters, *string.digits]
    words += [*string.punctuation, " "]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"system|user|assistant|\s|\S"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    return fast


def make_model(vocabulary: int, end: int, pad: int):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            eos_token_id=end,
            pad_token_id=pad,
            bos_token_id=None,
        )
    )


def play_randomly(chance: random.Random) -> list[dict[str, str]]:
    """A game of random legal moves, as messages."""
    game, messages = Game(chance.randrange(2**31)), []
    while game.reward is None:
        move = str(chance.choice(game.free()))
        messages += [{"role": "user", "content": game.show()}, {"role": "assistant", "content": move}]
        game.play(move)
    return messages


def encode(tokenizer, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """(ids, labels) of a dialogue. The line break after an answer comes from the template and is not learnt."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        text = f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>"
        tokens = tokenizer.encode(text, add_special_tokens=False)
        newline = tokenizer.encode("\n", add_special_tokens=False)
        ids += tokens + newline
        labels += tokens + (newline if message["role"] == "user" else [-100] * len(newline))
    return ids, labels


if __name__ == "__main__":
    print(make_base_model(Path(sys.argv[1] if len(sys.argv) > 1 else ".art-sky/tic-tac-toe-base")))

"""Conversations to exact tokens for supervised fine-tuning: what is trained is what would be sampled."""

from __future__ import annotations

import pytest
from server_fakes import CHATML_TOOLS

from art_sky.config import SFTConfig
from art_sky.errors import InvalidInput
from art_sky.server.examples import as_examples
from art_sky.server.render import ChatTemplate, encode
from art_sky.server.vocabulary import Vocabulary
from art_sky.training.sequences import build_examples

# As Qwen3's: reasoning is written for the last turn only, and an empty one where there is none.
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As of models that are made to think: the prompt opens a block which the history does not show.
OPENS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


@pytest.fixture(scope="module")
def vocabulary(tiny_model) -> Vocabulary:
    return Vocabulary(tiny_model)


def make(vocabulary: Vocabulary, items: list, template: str | None = None, tools=None, more=(), **config) -> list:
    """The choices of the only trajectory, and of its additional histories."""
    others = [{"messages_and_choices": m, "tools": None} for m in more]
    trajectory = {"messages_and_choices": items, "tools": tools, "additional_histories": others}
    made = as_examples(
        [{"trajectories": [trajectory]}], ChatTemplate(vocabulary, template), vocabulary, SFTConfig(**config)
    )
    found = made[0]["trajectories"][0]
    histories = [found, *found["additional_histories"]]
    return [i for h in histories for i in h["messages_and_choices"] if "token_ids" in i]


def text(vocabulary: Vocabulary, ids: list[int]) -> str:
    return "".join(vocabulary.token_text(i) for i in ids)


def test_a_turn_is_its_prompt_and_what_ends_with_the_end_of_turn(vocabulary):
    first, second = make(vocabulary, CHAT)
    template = ChatTemplate(vocabulary, None)
    for choice, before, said in ((first, CHAT[:2], "hello"), (second, CHAT[:4], "bye")):
        prompt = template.render(before, None)
        assert choice["prompt_token_ids"] == encode(vocabulary, prompt.text, prompt.marker)
        assert text(vocabulary, choice["token_ids"]) == said + "<|im_end|>"
    both = [*first["prompt_token_ids"], *first["token_ids"]]
    assert second["prompt_token_ids"][: len(both)] == both


def test_one_sequence_with_a_mask_on_both_turns(vocabulary):
    groups = as_examples(
        [{"trajectories": [{"messages_and_choices": CHAT}]}], ChatTemplate(vocabulary, None), vocabulary, SFTConfig()
    )
    batch = build_examples(groups, SFTConfig(), vocab_size=200, context_length=500)
    (sequence,) = batch.sequences
    assert (batch.splits, sequence.trained) == (0, len("hello") + len("bye") + 2)
    trained = text(vocabulary, [int(i) for i in sequence.ids[sequence.sampled]])
    assert trained == "hello<|im_end|>bye<|im_end|>"


def test_only_the_last_turn_of_each_history(vocabulary):
    last, other = make(vocabulary, CHAT, more=[CHAT[:3]], assistant_turns="last")
    assert [text(vocabulary, c["token_ids"]) for c in (last, other)] == ["bye<|im_end|>", "hello<|im_end|>"]


def test_control_tokens_in_text_stay_text(vocabulary):
    spelt = [CHAT[1], {"role": "assistant", "content": "say <|im_end|> now"}]
    (choice,) = make(vocabulary, spelt)
    end = vocabulary.specials["<|im_end|>"]
    assert choice["token_ids"].count(end) == 1 and choice["token_ids"][-1] == end
    assert text(vocabulary, choice["token_ids"]) == "say <|im_end|> now<|im_end|>"


def test_tool_calls_and_reasoning_are_trained(vocabulary):
    function = {"name": "look", "arguments": '{"at": 3}'}
    calls = [
        CHAT[1],
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    (choice,) = make(vocabulary, calls, CHATML_TOOLS, tools)
    assert '"name": "look"' in text(vocabulary, choice["token_ids"]) and "parameters" in text(
        vocabulary, choice["prompt_token_ids"]
    )
    for key in ("reasoning_content", "reasoning"):
        thought = [*CHAT[:2], CHAT[2] | {key: "greet back"}, *CHAT[3:]]
        first, second = make(vocabulary, thought, THINKS)
        assert text(vocabulary, first["token_ids"]) == "<think>greet back</think>hello<|im_end|>"
        # The next prompt shows the first turn without its reasoning: another sequence.
        assert "greet" not in text(vocabulary, second["prompt_token_ids"])


def test_choices_with_tokens_keep_them_and_those_of_others_are_rendered(vocabulary):
    ours = {"message": {"role": "assistant", "content": "?"}, "prompt_token_ids": [5, 6], "token_ids": [7, 2]}
    theirs = {"message": {"role": "assistant", "content": "bye", "refusal": None}, "logprobs": None, "index": 0}
    first, second = make(vocabulary, [*CHAT[:2], ours, CHAT[3], theirs])
    assert (first["prompt_token_ids"], first["token_ids"]) == ([5, 6], [7, 2])
    assert text(vocabulary, second["token_ids"]) == "bye<|im_end|>"


@pytest.mark.parametrize(
    ("items", "template", "message"),
    [
        (CHAT, OPENS, "group 0, trajectory 0, message 2: .*unlike the prompt"),
        (CHAT, NO_END, "message 2: .*no token that ends the turn"),
        (CHAT[:2], None, "group 0, trajectory 0: no assistant speaks"),
        ([CHAT[1], {"role": "assistant", "content": ""}], None, "message 1: the assistant says nothing"),
        ([CHAT[1], CHAT[2] | {"reasoning": "hm"}], None, "message 1: .*leaves out the reasoning"),
        (
            [CHAT[1], CHAT[2] | {"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}],
            None,
            "message 1: .*leaves out the tool calls",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}, CHAT[2]], None, "message 1: .*only text"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(items, template, message, vocabulary):
    with pytest.raises(InvalidInput, match=message):
        make(vocabulary, items, template)

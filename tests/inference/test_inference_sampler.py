"""The sampler draws what it says, and reports the logprob of what it drew."""

from __future__ import annotations

import pytest
import torch

from art_sky.inference.sampler import Draw, sample, uniform

N = 8_000


def draw_many(logits: torch.Tensor, **how: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies of N draws with one seed's stream, and the logprob that was reported for each token."""
    draws = [Draw(uniform=uniform(3, i), **{"temperature": 1.0, **how}) for i in range(N)]
    counts, logprobs = torch.zeros(len(logits)), torch.full((len(logits),), -torch.inf)
    for part in range(0, N, 2000):
        for drawn in sample(logits.repeat(2000, 1), draws[part : part + 2000]):
            assert drawn is not None
            counts[drawn.token] += 1
            logprobs[drawn.token] = drawn.logprob
    return counts / N, logprobs


def distance(frequencies: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Largest deviation in standard errors; rare tokens are given that of a token seen five times."""
    error = (probabilities.clamp_min(5 / N) / N).sqrt()
    return ((frequencies - probabilities).abs() / error).max().item()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("vocabulary", [7, 256, 600])
def test_frequencies_are_the_probabilities(vocabulary: int, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * 2
    want = (logits / temperature).softmax(-1)
    frequencies, logprobs = draw_many(logits, temperature=temperature)
    assert distance(frequencies, want) < 5
    seen = frequencies > 0
    assert torch.allclose(logprobs[seen], want[seen].log(), atol=1e-5)


@pytest.mark.parametrize(
    ("how", "allowed"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.6}, [0, 1]),
        ({"top_p": 0.49}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"top_k": 3, "min_p": 0.5}, [0, 1]),
        ({"top_p": 0.85, "top_k": 3}, [0, 1, 2]),
    ],
)
def test_filters_leave_the_likeliest_and_the_logprobs_alone(how: dict[str, float], allowed: list[int]) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04])
    frequencies, logprobs = draw_many(probabilities.log(), **how)
    want = torch.zeros(5)
    want[allowed] = probabilities[allowed] / probabilities[allowed].sum()
    assert distance(frequencies, want) < 5
    assert torch.allclose(logprobs[allowed], probabilities[allowed].log(), atol=1e-5)


def test_rows_with_and_without_filters_do_not_mix() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 3)
    draws = [Draw(0.0, 0.99, top_logprobs=2), Draw(1.0, 0.999), Draw(1.0, 0.999, top_k=1)]
    greedy, free, first = sample(logits, draws)
    assert greedy and free and first
    assert (greedy.token, free.token, first.token) == (1, 3, 1)
    want = torch.tensor([0.0, 3.0, 1.0, 2.0]).log_softmax(-1)
    assert greedy.logprob == first.logprob == pytest.approx(want[1].item())
    assert [t for t, _ in greedy.top] == [1, 3]
    assert [v for _, v in greedy.top] == pytest.approx([want[1].item(), want[3].item()], abs=1e-6)
    assert free.top == []


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_tokens_without_probability_are_never_drawn(u: float) -> None:
    for vocabulary in (10, 512, 700):
        logits = torch.full((1, vocabulary), -torch.inf)
        logits[0, vocabulary // 2] = 0.0
        (drawn,) = sample(logits, [Draw(1.0, u)])
        assert drawn and drawn.token == vocabulary // 2


def test_a_row_that_is_not_numbers_spoils_no_other() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, 0.0]])
    drawn = sample(logits, [Draw(1.0, 0.1), Draw(1.0, 0.1), Draw(0.0, 0.1), Draw(1.0, 0.1, top_p=0.5)])
    assert [d and d.token for d in drawn] == [0, None, None, 1]


def test_streams_are_uniform_and_their_own() -> None:
    values = torch.tensor([uniform(seed, i) for seed in range(20) for i in range(500)])
    assert ((values >= 0) & (values < 1)).all()
    assert abs(values.mean() - 0.5) < 0.02
    assert uniform(1, 23) != uniform(12, 3)
    assert uniform(5, 6) == uniform(5, 6)

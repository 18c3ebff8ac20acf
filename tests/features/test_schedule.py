"""The search for computed-step tables against brute force and hand calculations."""

from itertools import combinations

import numpy as np
import pytest
import torch

from diffcache.features.polynomial import lagrange_weights
from diffcache.features.predictors import BestOrder, Hold, Polynomial
from diffcache.features.schedule import Runs, best_steps, fit, gram

SIGMAS = (1.0, 0.93, 0.85, 0.76, 0.62, 0.5, 0.41, 0.27, 0.12, 0.0)  # 9 steps


def wavy(clips: int = 3, seed: int = 0) -> tuple[Runs, list[list[torch.Tensor]]]:
    """Outputs that bend differently in each clip."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for _ in range(clips):
        a, b, c = torch.randn(3, 2, 5, generator=generator).double()
        outputs.append([a + b * torch.sin(3 * s + c) + c * s**3 for s in torch.tensor(SIGMAS[:-1])])
    return Runs.of(SIGMAS, outputs), outputs


def cost(outputs, table, order: int, power: float, worst: float) -> float:
    """The definition, written out: power mean over clips in each gap, summed over the gaps."""
    widths = np.abs(np.diff(SIGMAS))
    weights = (widths / widths.mean()) ** power
    scale = [float(torch.stack(clip).square().sum((1, 2)).mean()) ** 0.5 for clip in outputs]
    total = 0.0
    for before, left, right in zip(table, table[1:], table[2:], strict=False):
        sums = []
        for clip, norm in zip(outputs, scale, strict=True):
            off = 0.0
            for k in range(left + 1, right):
                row = lagrange_weights([SIGMAS[before], SIGMAS[left]], SIGMAS[k], order)
                guess = row[0] * clip[before] + row[1] * clip[left]
                off += weights[k] * float((guess - clip[k]).square().sum()) ** 0.5 / norm
            sums.append(off)
        total += float(np.mean(np.power(sums, worst)) ** (1 / worst))
    return total


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("worst", [1.0, 8.0])
@pytest.mark.parametrize("count", [4, 5, 7])
def test_the_table_is_the_best_of_all_tables(order, power, worst, count) -> None:
    runs, outputs = wavy()
    predictor = Hold() if order == 0 else Polynomial(order=1)
    found = best_steps(
        runs, count, predictor=predictor, error_weight=power, worst=worst, warmup=2, tail=1
    )
    tables = [(0, 1, *inner, 8) for inner in combinations(range(2, 8), count - 3)]
    costs = {table: cost(outputs, table, order, power, worst) for table in tables}
    assert costs[found] == pytest.approx(min(costs.values()), rel=1e-6)
    assert max(costs.values()) > 1.05 * min(costs.values())  # there was something to find


def test_warm_up_and_tail_are_always_computed() -> None:
    runs, _ = wavy()
    table = best_steps(runs, 6, warmup=3, tail=2)
    assert table[:3] == (0, 1, 2) and table[-2:] == (7, 8) and len(table) == 6


def test_all_steps_are_the_table_of_that_count() -> None:
    assert best_steps(wavy()[0], 9) == tuple(range(9))


def test_the_worst_clip_counts_more_with_a_higher_exponent() -> None:
    """One clip bends early, three late: the mean serves the three, the worst serves the one too."""
    early = [torch.tensor([50.0, 1.5 * min(step - 7, 0) ** 2]) for step in range(15)]
    late = [torch.tensor([50.0, 1.5 * max(step - 7, 0) ** 2]) for step in range(15)]
    runs = Runs.of(tuple(np.linspace(1, 0, 16)), [early, late, late, late])
    mean = best_steps(runs, 7, worst=1.0, warmup=2)
    worst = best_steps(runs, 7, worst=16.0, warmup=2)
    assert sum(step <= 7 for step in worst) > sum(step <= 7 for step in mean)


def test_the_gram_matrix_is_that_of_the_outputs_scaled() -> None:
    outputs = [torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]])]
    # products 25, 8, 4; mean of the diagonal 14.5
    np.testing.assert_allclose(gram(outputs), np.array([[25, 8], [8, 4]]) / 14.5)


def test_a_count_that_does_not_fit_is_refused() -> None:
    runs, _ = wavy()
    with pytest.raises(ValueError, match=r"count must be in \[4, 9\], got 3"):
        best_steps(runs, 3)
    with pytest.raises(ValueError, match=r"count must be in \[4, 9\], got 10"):
        best_steps(runs, 10)


def test_a_predictor_that_looks_further_back_is_refused() -> None:
    with pytest.raises(ValueError, match="two computed steps back"):
        best_steps(wavy()[0], 5, predictor=BestOrder(max_order=2))


def test_runs_that_are_not_finite_or_not_square_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        Runs(sigmas=(1.0, 0.5, 0.0), grams=np.full((1, 2, 2), np.nan))
    with pytest.raises(ValueError, match=r"\[clips, 2, 2\] for 2 steps, got \[1, 3, 3\]"):
        Runs(sigmas=(1.0, 0.5, 0.0), grams=np.zeros((1, 3, 3)))


def test_fit_takes_the_table_with_the_highest_score_and_scores_none_twice() -> None:
    runs, _ = wavy()
    seen: list[tuple[int, ...]] = []
    wanted = (0, 1, 2, 3, 4, 8)

    def score(table: tuple[int, ...]) -> float:
        seen.append(table)
        return 9.0 if table == wanted else -sum(table)

    assert fit(runs, 6, score, others=[wanted]) == (wanted, 9.0)
    assert len(seen) == len(set(seen)) > 1

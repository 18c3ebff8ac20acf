"""Tables over sigma: laid on other schedules, and the gate that uses them."""

import math
from types import SimpleNamespace

import pytest

from diffcache import get_policy
from diffcache.features.tables import (
    SigmaTable,
    placed,
    shift_of,
    shipped_steps,
    shipped_tables,
)

SOLVERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")


def levels(steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels of a flow-matching schedule."""
    even = [1 - i / steps for i in range(steps)]
    return tuple(shift * u / (1 + (shift - 1) * u) for u in even)


def test_a_table_takes_the_nearest_step_and_each_step_once() -> None:
    grid = (1.0, 0.8, 0.6, 0.4, 0.2)
    assert placed((1.0, 0.61, 0.19), grid) == {0, 2, 4}
    assert placed((1.0, 0.99, 0.98), grid) == {0, 1, 2}  # the next ones free
    assert placed((0.21, 0.2, 0.19), grid) == {2, 3, 4}  # room is left for all
    assert placed((0.2, 1.0), grid) == {0, 4}  # in any order


def test_more_levels_than_steps_are_all_steps() -> None:
    assert placed(tuple(i / 9 for i in range(10)), (1.0, 0.5, 0.1)) == {0, 1, 2}


@pytest.mark.parametrize("shift", [1.0, 2.0, 5.0, 8.0])
@pytest.mark.parametrize("steps", [8, 20, 50])
def test_the_shift_is_read_off_a_schedule(shift: float, steps: int) -> None:
    assert shift_of(levels(steps, shift)) == pytest.approx(shift)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_schedule_that_was_measured_gets_its_own_table(solver: str) -> None:
    shipped = shipped_tables()[solver]
    for log_shift, lengths in shipped.items():
        for log_steps, shares in lengths.items():
            grid = levels(round(math.exp(log_steps)), math.exp(log_shift))
            for share, wanted in shares.items():
                found = shipped_steps(grid, solver, share)
                assert found == placed(tuple(wanted), grid)
                assert len(found) == len(wanted)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [8, 9, 13, 28, 40, 77, 100])
@pytest.mark.parametrize("shift", [1.0, 1.7, 3.0, 6.5, 8.0, 12.0])
@pytest.mark.parametrize("share", [0.16, 0.25, 0.44, 0.7, 0.95])
def test_any_schedule_gets_as_many_steps_as_asked_for(solver, steps, shift, share) -> None:
    found = shipped_steps(levels(steps, shift), solver, share)
    assert found is not None and len(found) == max(4, round(share * steps))
    assert {0, 1, 2, steps - 1} <= found <= set(range(steps))


@pytest.mark.parametrize("solver", SOLVERS)
def test_tables_are_denser_early_in_the_run(solver: str) -> None:
    """Small early errors decide what the video becomes."""
    found = shipped_steps(levels(50, 2.0), solver, 0.3)
    assert sum(step < 25 for step in found) > sum(step >= 25 for step in found)


def test_all_steps_are_computed_at_share_one() -> None:
    assert shipped_steps(levels(30, 3.0), SOLVERS[0], 1.0) == set(range(30))


def test_a_solver_or_a_schedule_without_a_table_gets_none() -> None:
    assert shipped_steps(levels(30, 3.0), "DDIMScheduler", 0.4) is None
    assert shipped_steps(levels(30, 3.0)[::-1], SOLVERS[0], 0.4) is None


def test_shorter_runs_compute_a_larger_share() -> None:
    gate = SigmaTable(fraction=0.3, reference_steps=50)
    assert gate.share(50) == pytest.approx(0.3)
    assert gate.share(200) == pytest.approx(0.15)  # twice as many of four times the steps
    assert gate.share(8) == pytest.approx(0.75)
    assert gate.share(4) == 0.8  # something is left to gain
    assert SigmaTable(fraction=0.9, reference_steps=50).share(4) == 0.9
    assert SigmaTable(fraction=0.3).share(8) == 0.3
    assert SigmaTable(fraction=1.0, reference_steps=50).share(200) == 1.0


@pytest.mark.parametrize("bad", [(), (1.2, 0.3), (-0.1,)])
def test_a_table_of_no_noise_levels_is_refused(bad) -> None:
    with pytest.raises(ValueError, match=r"sigmas must be noise levels in \[0, 1\]"):
        SigmaTable(sigmas=bad)


def test_a_reference_length_must_be_a_count() -> None:
    with pytest.raises(ValueError, match="reference_steps must be a whole number"):
        SigmaTable(reference_steps=2.5)


def test_a_gap_is_halved_while_predictions_are_no_better_than_nothing() -> None:
    gate, table = SigmaTable(), frozenset({0, 1, 2, 9, 10})

    def computed(error: float) -> list[int]:
        reuses, found = 0, []
        for place in range(3, 9):
            cell = SimpleNamespace(numbers={"error": error}, reuses_in_a_row=reuses)
            if gate._halved(place, table, cell):
                found.append(place)
                reuses = 0
            else:
                reuses += 1
        return found

    assert computed(0.9) == []
    assert computed(1.1) == [6]
    assert computed(float("nan")) == [6]


@pytest.mark.parametrize(
    ("settings", "solver", "said"),
    [
        ({}, SOLVERS[0], "measured on diffcache's demo model"),
        ({}, "DPMSolverMultistepScheduler", "no table of computed steps for DPMSolverMultistep"),
        ({"shipped": False}, SOLVERS[0], "an analytic one is used"),
        ({"fraction": 1.0}, SOLVERS[0], None),
        ({"steps": (0, 1, 5)}, SOLVERS[0], None),
        ({"sigmas": (1.0, 0.5)}, SOLVERS[0], None),
    ],
)
def test_the_report_says_whose_table_it_was(settings, solver, said) -> None:
    policy = get_policy("forecast", **settings)
    context = SimpleNamespace(levels=levels(30, 3.0), solver=solver)
    found = policy.remarks(context)
    assert (found == []) if said is None else (len(found) == 1 and said in found[0])

import math

import numpy as np
import pytest
from scipy import stats

from depthroute.studies import statistics
from depthroute.studies.statistics import Curve


def test_tail_mean_is_the_mean_of_the_last_k():
    assert statistics.tail_mean([9.0, 3.0, 2.0, 1.0], 3) == 2.0
    assert statistics.tail_mean([3.0, 1.0], 11) == 2.0


def test_tail_mean_refuses_no_losses_and_no_length():
    with pytest.raises(ValueError, match="losses: got none"):
        statistics.tail_mean([], 3)
    with pytest.raises(ValueError, match="k: got 0"):
        statistics.tail_mean([1.0], 0)


def test_summary_of_a_table_with_a_known_answer():
    # 2, 4, 4, 4, 5, 5, 7, 9: mean 5, squared deviations add up to 32.
    summary = statistics.summarise([2, 4, 4, 4, 5, 5, 7, 9])
    assert summary.mean == 5.0
    assert summary.standard_deviation == pytest.approx(math.sqrt(32 / 7))
    assert summary.standard_error == pytest.approx(math.sqrt(32 / 7 / 8))
    assert summary.n == 8


def test_summary_of_one_value_has_no_spread():
    assert statistics.summarise([3.0]) == statistics.Summary(3.0, None, None, 1)


def test_paired_difference_equals_scipy_on_many_tables():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5, 20):
        arm, baseline = rng.normal(3.0, 0.1, n), rng.normal(3.1, 0.1, n)
        found = statistics.paired_difference(dict(enumerate(arm)), dict(enumerate(baseline)))
        assert found.mean == pytest.approx(np.mean(arm - baseline), rel=1e-12)
        assert found.standard_deviation == pytest.approx(stats.tstd(arm - baseline), rel=1e-12)
        assert found.standard_error == pytest.approx(stats.sem(arm - baseline), rel=1e-12)
        assert found.p == pytest.approx(stats.ttest_1samp(arm - baseline, 0.0).pvalue, rel=1e-9)
        assert found.n == n


def test_paired_difference_with_a_known_answer():
    # Differences -1, -2, -3: t = -2 / (1 / sqrt 3) = -2 sqrt 3 with two degrees of freedom, p = 1 - t / sqrt(t^2 + 2).
    found = statistics.paired_difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 3.0, 1: 5.0, 2: 7.0})
    assert (found.mean, found.standard_deviation, found.n) == (-2.0, 1.0, 3)
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))


def test_only_seeds_of_both_sides_are_paired():
    found = statistics.paired_difference({0: 1.0, 2: 5.0, 7: 9.0}, {2: 4.0, 7: 9.0, 1: 0.0})
    assert found.seeds == (2, 7)
    assert found.mean == 0.5


def test_one_pair_and_equal_differences_have_no_p():
    assert statistics.paired_difference({0: 1.0}, {0: 2.0}).p is None
    same = statistics.paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.mean, same.standard_deviation, same.p) == (0.0, 0.0, None)


def test_no_shared_seed_is_an_error():
    with pytest.raises(ValueError, match=r"share no seed: got \[0\] and \[1\]"):
        statistics.paired_difference({0: 1.0}, {1: 1.0})


def test_best_learning_rate_of_each_arm():
    best = statistics.best_learning_rates(
        {
            "additive": {1e-4: {0: 3.4, 1: 3.4}, 5e-4: {0: 3.2, 1: 3.0}, 1e-3: {0: 3.3, 1: 3.1}},
            "mhar": {1e-4: {0: 3.4}, 5e-4: {0: 3.2}, 1e-3: {0: 3.0}},
        }
    )
    assert (best["additive"].learning_rate, best["additive"].at_edge) == (5e-4, False)
    assert best["additive"].mean == pytest.approx(3.1)
    assert best["additive"].losses == {0: 3.2, 1: 3.0}
    assert (best["mhar"].learning_rate, best["mhar"].at_edge) == (1e-3, True)
    assert best["mhar"].tried == (1e-4, 5e-4, 1e-3)


def test_a_rate_that_lost_or_diverged_on_a_seed_is_not_the_best():
    best = statistics.best_learning_rates(
        {"mhar": {1e-4: {0: 3.4, 1: 3.4}, 1e-3: {0: 3.0}, 1e-2: {0: 2.0, 1: float("nan")}}}
    )["mhar"]
    assert best.learning_rate == 1e-4
    assert best.incomplete == (1e-3, 1e-2)


def test_an_arm_without_one_complete_rate_is_an_error():
    with pytest.raises(ValueError, match="arm 'mhar': no learning rate has a finite loss for every seed"):
        statistics.best_learning_rates({"mhar": {1e-4: {0: float("nan")}}})


def _line(final_step: int, tokens_per_step: int, slope: float) -> Curve:
    steps = np.arange(1, final_step + 1, dtype=np.float64)
    return Curve(steps, steps * tokens_per_step, 10.0 - slope * steps)


def test_curve_reads_evaluation_records():
    found = statistics.curve([{"step": 5, "tokens": 50, "loss": 3.0}, {"step": 10, "tokens": 100, "loss": 2.0}])
    assert found.steps.tolist() == [5, 10]
    assert found.tokens.tolist() == [50, 100]
    assert found.losses.tolist() == [3.0, 2.0]


def test_curve_refuses_steps_that_do_not_rise():
    with pytest.raises(ValueError, match=r"steps must rise, got \[10, 5\]"):
        statistics.curve([{"step": 10, "tokens": 1, "loss": 3.0}, {"step": 5, "tokens": 2, "loss": 2.0}])
    with pytest.raises(ValueError, match="evaluations: got none"):
        statistics.curve([])


def test_mean_curve_is_over_the_steps_that_all_seeds_have():
    left = Curve(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 30.0]), np.array([4.0, 3.0, 2.0]))
    right = Curve(np.array([2.0, 3.0]), np.array([20.0, 30.0]), np.array([5.0, 4.0]))
    found = statistics.mean_curve([left, right])
    assert found.steps.tolist() == [2, 3]
    assert found.tokens.tolist() == [20, 30]
    assert found.losses.tolist() == [4.0, 3.0]
    with pytest.raises(ValueError, match="share no step"):
        statistics.mean_curve([left, Curve(np.array([9.0]), np.array([90.0]), np.array([1.0]))])


def test_equal_step_equal_token_and_equal_wall_clock_readings():
    curves = {"small batch": _line(8, 100, 1.0), "large batch": _line(6, 200, 1.0)}
    steps = statistics.equal_steps(curves)
    assert (steps.axis, steps.at, steps.losses) == ("step", 6.0, {"small batch": 4.0, "large batch": 4.0})
    tokens = statistics.equal_tokens(curves)
    assert (tokens.at, tokens.losses) == (800.0, {"small batch": 2.0, "large batch": 6.0})
    # 800 tokens at 100/s and 1200 at 100/s: both trained for 8 s.
    clock = statistics.equal_wall_clock(curves, {"small batch": 100.0, "large batch": 100.0}, unfused=("large batch",))
    assert (clock.axis, clock.at) == ("seconds", 8.0)
    assert clock.losses == {"small batch": 2.0, "large batch": 6.0}
    assert clock.unfused == ("large batch",)


def test_a_reading_between_two_evaluations_is_linear():
    assert statistics.equal_steps({"a": _line(8, 1, 1.0)}, step=2.5).losses == {"a": 7.5}


def test_an_arm_too_slow_to_have_been_evaluated_in_time_is_late_and_no_error():
    curves = {"fast": _line(8, 1, 1.0), "slow": _line(8, 1, 1.0)}
    clock = statistics.equal_wall_clock(curves, {"fast": 1000.0, "slow": 1.0})
    assert clock.late == ("slow",)
    assert clock.losses.keys() == {"fast"}
    assert statistics.equal_wall_clock(curves, {"fast": 1.0, "slow": 0.9}).late == ()


def test_readings_outside_a_curve_and_without_a_speed_are_errors():
    with pytest.raises(ValueError, match="arm 'a' was evaluated from step 1 to 8, not at 9"):
        statistics.equal_steps({"a": _line(8, 1, 1.0)}, step=9)
    with pytest.raises(ValueError, match="arm 'a' has None, wants a positive speed"):
        statistics.equal_wall_clock({"a": _line(8, 1, 1.0)}, {})
    with pytest.raises(ValueError, match="unfused: no arm 'b'"):
        statistics.equal_wall_clock({"a": _line(8, 1, 1.0)}, {"a": 1.0}, unfused=("b",))

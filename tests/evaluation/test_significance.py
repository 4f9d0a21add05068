"""Tests of significance against the paper's numbers, scipy and worked examples."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from depthroute.evaluation import compare_tasks, holm, mcnemar, paired_bootstrap


@pytest.mark.parametrize(("won", "lost", "paper"), [(123, 81, ".004"), (27, 13, ".038")])
def test_mcnemar_gives_the_p_values_of_the_paper(won, lost, paper):
    assert f"{mcnemar(lost, won):.3f}"[1:] == paper
    assert mcnemar(won, lost) == mcnemar(lost, won)


def test_mcnemar_equals_scipys_binomial_tail_on_random_tables():
    draw = np.random.default_rng(0)
    for only_first, only_second in draw.integers(0, 60, size=(100, 2)):
        n = only_first + only_second
        both_tails = 2 * stats.binom.cdf(min(only_first, only_second), n, 0.5)
        assert mcnemar(only_first, only_second) == pytest.approx(min(1.0, both_tails))


def test_mcnemar_equals_scipy_on_random_items():
    draw = np.random.default_rng(1)
    for _ in range(20):
        first, second = draw.integers(0, 2, size=(2, 50))
        won, lost = int((second > first).sum()), int((first > second).sum())
        (task,) = compare_tasks(scores(first), scores(second), resamples=10).tasks
        assert (task.only_candidate, task.only_baseline) == (won, lost)
        assert task.p == pytest.approx(stats.binomtest(won, won + lost).pvalue)


def test_no_discordant_item_is_no_evidence():
    assert mcnemar(0, 0) == 1.0


@pytest.mark.parametrize(("counts", "error"), [((-1, 2), ValueError), ((1.5, 2), TypeError), ((True, 2), TypeError)])
def test_counts_that_are_none_are_refused(counts, error):
    with pytest.raises(error, match="only_baseline is"):
        mcnemar(*counts)


def test_the_interval_agrees_with_scipys_bootstrap():
    first, second = pairs(200)
    ours = paired_bootstrap(first, second, resamples=4000)
    theirs = stats.bootstrap(
        (second - first,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert ours.mean == pytest.approx((second - first).mean())
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02)


def test_the_interval_holds_the_true_difference_as_often_as_it_says():
    held = [
        interval.low < 0.3 < interval.high
        for interval in (paired_bootstrap(*pairs(60, seed), resamples=400, seed=seed) for seed in range(200))
    ]
    assert 0.89 < np.mean(held) < 0.99


def test_the_p_value_belongs_to_the_interval():
    """It is below 1 - confidence where the interval leaves zero out, and above where it does not."""
    for seed in range(40):
        interval = paired_bootstrap(*pairs(30, seed), seed=seed, resamples=999)
        assert (interval.p < 0.05) == (interval.low > 0 or interval.high < 0) or 0.045 < interval.p < 0.055


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    first, second = pairs(50)
    assert paired_bootstrap(first, second, seed=3) == paired_bootstrap(first, second, seed=3)
    assert paired_bootstrap(first, second, seed=3) != paired_bootstrap(first, second, seed=4)


def test_equal_models_have_no_difference():
    first, _ = pairs(20)
    interval = paired_bootstrap(first, first, resamples=100)
    assert (interval.mean, interval.low, interval.high, interval.p) == (0.0, 0.0, 0.0, 1.0)


def test_a_weight_counts_an_item_as_often_as_it_says():
    first, second = np.zeros(3), np.array([1.0, 2.0, 6.0])
    assert paired_bootstrap(first, second, weights=[1, 1, 2], resamples=10).mean == pytest.approx(15 / 4)
    constant = paired_bootstrap(first, np.full(3, 0.5), weights=[1, 5, 2], resamples=10)
    assert (constant.low, constant.high) == pytest.approx((0.5, 0.5))


def test_many_items_are_resampled_in_chunks():
    draw = np.random.default_rng(0)
    second = draw.normal(size=2**20 + 1)
    interval = paired_bootstrap(np.zeros_like(second), second, resamples=3)
    assert interval.low <= interval.high
    assert abs(interval.mean) < 0.01


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 0], [1]), {}, "baseline has 2 items, candidate 1"),
        (([], []), {}, "have no items"),
        (([1, float("nan")], [1, 0]), {}, "baseline: item 1 is nan"),
        (([1, 0], [1, 0]), {"weights": [1, 0]}, "weights: the smallest is 0"),
        (([1, 0], [1, 0]), {"weights": [1]}, "weights 1"),
        (([1, 0], [1, 0]), {"confidence": 95}, "confidence is 95"),
        (([1, 0], [1, 0]), {"resamples": 0}, "resamples is 0"),
    ],
)
def test_samples_that_cannot_be_compared_are_refused(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        paired_bootstrap(*arguments, **options)


def test_holm_on_a_worked_example():
    """.01 x 4, .02 x 3, .04 x 2 and .03 x 2 sorted: .01, .02, .03, .04 give .04, .06, .06, .06."""
    corrected = holm({"a": 0.04, "b": 0.01, "c": 0.03, "d": 0.02})
    assert list(corrected) == ["a", "b", "c", "d"]
    assert corrected == pytest.approx({"a": 0.06, "b": 0.04, "c": 0.06, "d": 0.06})


def test_holm_leaves_one_value_alone_and_ends_at_one():
    assert holm({"a": 0.2}) == {"a": 0.2}
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}
    with pytest.raises(ValueError, match=r"'a' has 1\.5"):
        holm({"a": 1.5})


def test_each_task_gets_the_test_that_fits_its_scores():
    baseline = {"arc": {1: 0, 2: 1, 3: 0}, "wikitext": {1: -2.5, 2: -3.0}}
    candidate = {"wikitext": {2: -2.0, 1: -2.0}, "arc": {3: True, 2: True, 1: False}}
    table = compare_tasks(baseline, candidate, weights={"wikitext": {1: 1, 2: 3}}, names=("plain", "mhar"))
    arc, wikitext = table.tasks
    assert (arc.test, arc.only_baseline, arc.only_candidate, arc.p) == ("mcnemar", 0, 1, 1.0)
    assert (arc.baseline, arc.candidate) == pytest.approx((1 / 3, 2 / 3))
    assert (wikitext.test, wikitext.only_baseline) == ("bootstrap", None)
    assert wikitext.difference == pytest.approx((0.5 + 3 * 1.0) / 4)
    assert {task.task: task.p_holm for task in table.tasks} == holm({"arc": arc.p, "wikitext": wikitext.p})


def test_the_table_as_markdown_and_json():
    won = {"gsm8k": {i: int(i < 123) for i in range(300)}}
    lost = {"gsm8k": {i: int(123 <= i < 204) for i in range(300)}}
    table = compare_tasks(lost, won, names=("plain", "a|b"), resamples=200)
    head, rule, row = table.to_markdown().splitlines()
    assert head.startswith(r"| task | items | plain | a\|b | difference |")
    assert rule.count("|") == row.count("|") == head.replace(r"\|", "").count("|") == 11
    assert row.startswith("| gsm8k | 300 | 0.2700 | 0.4100 | +0.1400 |")
    assert row.endswith("| 81 | 123 | 0.0040 | 0.0040 |")
    saved = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert saved["candidate"] == "a|b"
    assert saved["tasks"][0]["p"] == mcnemar(81, 123)


@pytest.mark.parametrize(
    ("baseline", "candidate", "weights", "message"),
    [
        ({"a": {1: 0}}, {"b": {1: 0}}, None, "tasks: candidate lacks 1 of the 1 that baseline has, 'a' among them"),
        ({"a": {1: 0, 2: 1}}, {"a": {1: 0}}, None, "items of task 'a': candidate lacks 1 of the 2 .* 2 among them"),
        ({"a": {1: 0}}, {"a": {1: 0, 7: 1}}, None, "items of task 'a': baseline lacks 1 of the 2 .* 7 among them"),
        ({"a": {}}, {"a": {}}, None, "items of task 'a': there are none"),
        ({}, {}, None, "tasks: there are none"),
        ({"a": {1: 0.5}}, {"a": {1: float("inf")}}, None, "task 'a': candidate: item 0 is inf"),
        ({"arc": {1: 0}}, {"arc": {1: 0}}, {"ark": {1: 1}}, "unknown task 'ark'; did you mean 'arc'"),
        ({"a": {1: 0}}, {"a": {1: 0}}, {"a": {2: 1}}, "weights of task 'a': weights lacks"),
    ],
)
def test_models_with_different_items_are_refused(baseline, candidate, weights, message):
    with pytest.raises(ValueError, match=message):
        compare_tasks(baseline, candidate, weights=weights)


def scores(values):
    return {"task": dict(enumerate(values))}


def pairs(n, seed=0):
    """Scores of two models whose mean difference is 0.3 in truth."""
    draw = np.random.default_rng(seed)
    first = draw.normal(size=n)
    return first, first + 0.3 + draw.normal(size=n)

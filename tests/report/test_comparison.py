"""The numbers of a comparison and the sentences made of them, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from depthroute.report.comparison import compare
from depthroute.report.folders import Group
from depthroute.report.formats import MINUS
from depthroute.report.runs import Run


def group(losses, *, baseline="additive", unfinished=(), summaries=None, environments=None):
    """A group of runs with these tail losses: arm -> seed -> loss."""
    runs = []
    for arm, by_seed in losses.items():
        for seed, loss in by_seed.items():
            summary = {"tail_loss": loss, "tokens": 1_000_000, "steps": 100, "unigram_entropy": 6.5}
            summary |= {"tail_evaluations": 11, "tokens_per_second": 1000 + seed, "parameters": 10}
            summary |= (summaries or {}).get((arm, seed), {})
            environment = {"commit": "a", "dirty": False} | (environments or {}).get((arm, seed), {})
            runs.append(Run(arm, seed, Path(arm), "finished", summary=summary, environment=environment))
    runs += [Run(arm, seed, Path(arm), "unfinished", "killed") for arm, seed in unfinished]
    return Group("", tuple(dict.fromkeys(run.arm for run in runs)), baseline, tuple(runs))


def said(comparison):
    return " ".join(comparison.statement)


def test_means_deviations_and_paired_differences():
    found = compare(group({"additive": {0: 3.0, 1: 3.2, 2: 3.4}, "mhar": {0: 2.9, 1: 3.0, 2: 3.1}}))
    additive, mhar = found.arms
    assert additive.loss.mean == pytest.approx(3.2)
    assert additive.loss.standard_deviation == pytest.approx(0.2)
    assert additive.difference is None
    assert additive.is_baseline
    assert mhar.difference.mean == pytest.approx(-0.2)
    assert mhar.difference.standard_error == pytest.approx(0.1 / math.sqrt(3))
    assert mhar.lower_in == 3
    assert found.best == "mhar"
    assert found.unigram_entropy == 6.5
    assert mhar.tokens_per_second == 1001


def test_one_pair_is_compared_sequence_by_sequence():
    found = group({"control": {0: 3.0}, "gated": {0: 2.9}}, baseline="control")
    losses = {"control": (2.0, 3.0, 4.0), "gated": (1.9, 2.9, 3.7)}
    evaluations = ({"step": 5, "tokens": 50, "loss": 3.0}, {"step": 10, "tokens": 100, "loss": 3.0})
    runs = tuple(
        replace(
            run,
            evaluations=evaluations,
            sequence_losses={5: {"losses": (0.0, 0.0, 0.0)}, 10: {"losses": losses[run.arm], "ema_losses": (1.0, 1.5)}},
            summary={**run.summary, "final_ema_loss": 2.5},
        )
        for run in found.runs
    )
    comparison = compare(replace(found, runs=runs))
    control, gated = comparison.arms
    assert control.over_sequences is None
    assert gated.over_sequences.mean == pytest.approx(-0.5 / 3)
    assert gated.over_sequences.standard_error == pytest.approx(0.2 / 3)
    assert (gated.averaged.mean, gated.averaged_over_sequences.mean) == (2.5, 0)
    text = said(comparison)
    assert f"over the 3 held-out ones, the last evaluations differ by: gated {MINUS}0.1667 ± 0.0667" in text
    assert "With averaged weights the last evaluations are: control 2.5000, gated 2.5000; sequence by sequence" in text


def test_several_pairs_are_not_compared_sequence_by_sequence():
    found = compare(group({"additive": {0: 3.0, 1: 3.1}, "mhar": {0: 2.9, 1: 3.0}}))
    assert found.arms[1].over_sequences is None
    assert "Sequence by sequence" not in said(found)


def test_differences_use_the_seeds_that_both_finished():
    losses = {"additive": {0: 3.0, 1: 9.0}, "mhar": {0: 2.9, 2: 1.0}}
    found = compare(group(losses, unfinished=[("additive", 2), ("mhar", 1)]))
    mhar = found.arms[1]
    assert mhar.difference.seeds == (0,)
    assert mhar.difference.mean == pytest.approx(-0.1)
    assert mhar.unfinished == (1,)
    assert found.cautions[0].startswith("2 of 6 runs are not finished and not part of these numbers")


def test_the_statement_names_the_best_arm_with_its_numbers_and_their_n():
    text = said(compare(group({"additive": {0: 3.0, 1: 3.2, 2: 3.4}, "mhar": {0: 2.9, 1: 3.0, 2: 3.1}})))
    assert "mhar has the lowest held-out loss: 3.0000 ± 0.1000 nats per token" in text
    assert "(mean ± standard deviation of 3 seeds)" in text
    assert "a paired difference of −0.2000 ± 0.0577 to the baseline additive, lower in 3 of 3 pairs." in text  # noqa: RUF001
    assert "not significant at the 5 % level (two-sided paired t-test, n = 3, p = 0.074" in text
    assert "Every finished arm is below the unigram entropy of the held-out text (6.5000), the worst by 3.3000" in text


def test_a_clear_difference_is_called_significant():
    text = said(compare(group({"additive": {0: 3.0, 1: 3.2, 2: 3.4}, "mhar": {0: 2.9, 1: 3.101, 2: 3.299}})))
    assert "That is significant at the 5 % level" in text
    assert "not corrected for the choice of arm" in text


def test_one_pair_is_never_more_than_one_pair():
    text = said(compare(group({"additive": {0: 3.0}, "mhar": {0: 2.9}})))
    assert "(one seed)" in text
    assert "One pair of runs cannot tell such a difference from chance." in text
    assert "significant" not in text
    assert "±" not in text


def test_two_pairs_come_with_a_warning():
    text = said(compare(group({"additive": {0: 3.0, 1: 3.1}, "mhar": {0: 2.9, 1: 3.08}})))
    assert "With two pairs such a test is nearly blind" in text


def test_the_lead_over_the_next_arm_is_stated_beside_the_other_arms():
    losses = {"additive": {0: 3.0, 1: 3.1}, "single": {0: 2.92, 1: 3.03}, "mhar": {0: 2.9, 1: 3.0}}
    text = said(compare(group(losses)))
    assert "To the next arm, single, it differs by −0.0250 ± 0.0050 (n = 2, p = 0.13)." in text  # noqa: RUF001
    assert "Against the baseline the other arms differ by: single −0.0750 ± 0.0050 (mean ± standard error)." in text  # noqa: RUF001


def test_a_baseline_that_wins_is_said_to_win():
    text = said(compare(group({"additive": {0: 3.0, 1: 3.1}, "mhar": {0: 3.15, 1: 3.35}})))
    assert text.startswith("additive has the lowest held-out loss")
    assert "no other arm is below this baseline" in text
    assert "mhar +0.2000" in text


def test_an_arm_that_did_not_learn_is_named():
    text = said(compare(group({"additive": {0: 3.0}, "mhar": {0: 6.6}})))
    assert "mhar did not get below the unigram entropy of the held-out text (6.5000)." in text


def test_an_arm_that_diverged_is_named_and_not_ranked():
    found = compare(group({"additive": {0: 3.0, 1: 3.1}, "mhar": {0: 2.0, 1: math.nan}}))
    assert found.best == "additive"
    assert "mhar diverged in at least one seed and cannot be ranked." in said(found)


def test_arms_of_other_seeds_stand_where_their_pairs_put_them():
    losses = {"additive": {0: 4.2, 1: 4.0, 2: 3.9}, "one": {0: 4.1}, "three": {0: 4.15, 1: 3.95, 2: 3.85}}
    found = compare(group(losses))
    assert found.best == "one"  # its own loss is higher than the others' means
    text = said(found)
    assert text.startswith("one has the lowest held-out loss, seed by seed: 4.1000 nats per token (one seed), a paired")
    assert f"To the next arm, three, it differs by {MINUS}0.0500 (n = 1)." in text
    assert "the worst by 2.4000" in text


def test_a_baseline_that_diverged_is_no_baseline():
    found = compare(group({"additive": {0: 3.0, 1: math.nan}, "mhar": {0: 2.0, 1: 2.1}}))
    text = said(found)
    assert (
        "mhar has the lowest held-out loss: 2.0500 ± 0.0707 nats per token (mean ± standard deviation of 2 seeds); the "
        "baseline diverged, so there is no paired difference." in text
    )
    assert "additive diverged in at least one seed and cannot be ranked." in text
    assert "nan" not in text


def test_nothing_finished_is_said_plainly():
    found = compare(group({}, unfinished=[("additive", 0), ("mhar", 0)]))
    assert found.statement == ("No run is finished yet, so there is nothing to compare.",)
    assert found.best is None


def test_a_single_run_is_described_alone():
    text = said(compare(group({"mhar": {0: 3.25}}, baseline=None)))
    assert "mhar reached a held-out loss of 3.2500 nats per token after 1.00 M tokens (100 steps)." in text
    assert "3.2500 below the unigram entropy" in text
    assert "One run says nothing about the spread between seeds." in text


@pytest.mark.parametrize(
    ("summary", "environment", "caution"),
    [
        ({"tokens": 5}, {}, "different numbers of training tokens"),
        ({"unigram_entropy": 6.4}, {}, "different held-out texts"),
        ({"tail_evaluations": 3}, {}, "different numbers of evaluations in the tail mean"),
        ({}, {"commit": "b"}, "2 different commits"),
        ({}, {"dirty": True}, "changes that are in no commit"),
        ({}, {"devices": ["other"]}, "different devices"),
    ],
)
def test_what_makes_runs_unlike_is_said(summary, environment, caution):
    losses = {"additive": {0: 3.0}, "mhar": {0: 2.9}}
    found = compare(group(losses, summaries={("mhar", 0): summary}, environments={("mhar", 0): environment}))
    assert any(caution in text for text in found.cautions)
    assert compare(group(losses)).cautions == ()

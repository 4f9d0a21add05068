"""Pages and figures about what an evaluation found."""

from __future__ import annotations

import json
import math
import shutil

import pytest

from depthroute.report import build_report
from depthroute.report.evaluation_parts import differences
from depthroute.report.evaluations import read_evaluation
from depthroute.report.folders import read_folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory, make_evaluation):
    """The results folder of two models, of which the second is much better."""
    return make_evaluation(tmp_path_factory.mktemp("evaluations") / "pair", {"plain": 0.0, "routed": 0.3}, limit=300)


@pytest.fixture
def evaluation(pair):
    return read_evaluation(pair, [])


def test_scores_are_those_of_the_file_with_their_errors(evaluation):
    rows = {(row.task, row.metric): row for row in evaluation.rows}
    assert [key for key in rows if key[1] != "bad"] == [
        ("all", "acc"),
        ("hellaswag", "acc_norm"),
        ("piqa", "acc"),
        ("wikitext", "word_perplexity"),
    ]
    row = rows["hellaswag", "acc_norm"]
    metrics = evaluation.found["models"]["routed"]["tasks"]["hellaswag"]["metrics"]
    assert (row.scores["routed"].value, row.scores["routed"].error) == (metrics["acc_norm,none"], 0.02)
    assert (row.items, row.shots) == (300, 0)
    assert rows["all", "acc"].scores["plain"].error is None
    assert rows["all", "acc"].shots is None


def test_what_is_significant_is_said_with_its_size(evaluation):
    (sentence,) = evaluation.statement
    tasks = {task["task"]: task for task in evaluation.comparisons[0]["tasks"]}
    assert sentence.startswith("routed and plain differ significantly on 3 of 3 tasks (5 % level, corrected")
    assert f"hellaswag acc_norm {tasks['hellaswag acc_norm']['difference']:+.4f}" in sentence


def test_what_is_not_significant_is_not_said_to_differ(tmp_path, make_evaluation):
    folder = make_evaluation(tmp_path / "same", {"a": 0.0, "b": 0.001})
    found = read_evaluation(folder, [])
    for task in found.comparisons[0]["tasks"]:
        task["p_holm"] = 0.05
    (sentence,) = found.statement
    assert sentence.startswith("b and a do not differ significantly on any of 3 tasks")
    assert sentence.endswith("the smallest corrected p-value is that of hellaswag acc_norm, p = 0.05.")


def test_intervals_are_those_of_the_file_with_a_dot_where_significant(evaluation):
    tasks = [dict(task) for task in evaluation.comparisons[0]["tasks"]]
    tasks[0]["p_holm"], tasks[1]["p_holm"] = 0.049, 0.05
    _, bar, dot, _, other = differences(tasks, "difference").axes[0].lines[:5]
    assert list(bar.get_xdata()) == [tasks[0]["low"], tasks[0]["high"]]
    assert list(dot.get_xdata()) == [tasks[0]["difference"]]
    assert (dot.get_marker(), other.get_marker()) == ("o", "|")


def test_a_page_has_the_tests_the_scores_and_what_limits_them(pair):
    path = build_report(pair)
    page = path.read_text()
    for text in ("plain and routed", "p (Holm)", "McNemar", "bootstrap", "only the first 300 items of each task"):
        assert text in page
    assert "piqa: read as text" in page
    assert 'href="../plain/hellaswag.items.jsonl"' in page
    assert 'href="../evaluation.json"' in page
    assert "<dt>commit</dt><dd>0123abc; 4567def</dd>" in page
    figures = {found.name for found in (path.parent / "figures").iterdir()}
    assert figures == {"evaluation-1-differences-1-routed.svg", "evaluation-1-differences-1-routed-losses.svg"}


def test_a_score_that_is_not_finite_is_shown_with_a_note(pair, tmp_path):
    content = json.loads((pair / "evaluation.json").read_text())
    metrics = content["models"]["routed"]["tasks"]["wikitext"]["metrics"]
    metrics |= {"word_perplexity,none": "inf", "word_perplexity_stderr,none": "nan"}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    found = read_evaluation(tmp_path, [])
    (row,) = (row for row in found.rows if (row.task, row.metric) == ("wikitext", "word_perplexity"))
    assert (row.scores["routed"].value, row.scores["routed"].error) == (math.inf, None)
    assert "routed: wikitext has no finite word_perplexity (inf), bad (nan): look at" in " ".join(found.cautions)
    assert ">inf</td>" in build_report(tmp_path).read_text()


def test_tasks_that_were_left_out_of_a_comparison_are_said(evaluation):
    (before,) = evaluation.statement
    sentence = "piqa acc is not compared: the scores of plain on 1 of 200 items are not finite (nan)"
    evaluation.comparisons[0]["left_out"] = [sentence]
    assert evaluation.statement == (before, "1 task is not compared, as the notes say.")
    assert sentence in evaluation.cautions


def test_a_comparison_without_a_task(pair, tmp_path):
    content = json.loads((pair / "evaluation.json").read_text())
    content["comparisons"][0] |= {"tasks": [], "left_out": ["piqa acc is not compared: so it is"]}
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    page = build_report(tmp_path).read_text()
    said = "routed and plain are not compared: there is no task on which all scores of both are finite."
    assert said in page
    assert "<li>piqa acc is not compared: so it is</li>" in page


def test_a_file_of_an_earlier_version_says_nothing_of_what_was_left_out(pair, tmp_path):
    content = json.loads((pair / "evaluation.json").read_text())
    content["comparisons"][0].pop("left_out")
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    problems = []
    found = read_evaluation(tmp_path, problems)
    assert problems == []
    assert (found.statement, found.cautions) == (
        read_evaluation(pair, []).statement,
        read_evaluation(pair, []).cautions,
    )


def test_what_was_not_alike_is_a_caution(evaluation):
    assert not any("part of a difference" in caution for caution in evaluation.cautions)
    evaluation.found["models"]["routed"] |= {"dtype": "bfloat16", "device": "cuda"}
    evaluation.found["models"]["routed"]["settings"]["max_length"] = 1024
    plain = evaluation.found["models"]["plain"]
    context = plain["settings"]["max_length"]
    said = "plain {}, routed {}, which may be part of a difference"
    assert evaluation.cautions[:3] == (
        f"other dtypes: {said.format(plain['dtype'], 'bfloat16')}; --dtype runs both in one",
        f"other devices: {said.format(plain['device'], 'cuda')}",
        f"other contexts: {said.format(f'{context:,} tokens', '1,024 tokens')}",
    )


def test_one_model_has_scores_and_no_comparison(tmp_path, make_evaluation):
    page = build_report(make_evaluation(tmp_path / "one", {"plain": 0.0})).read_text()
    assert "plain on 4 tasks." in page
    assert "p (Holm)" not in page


def test_an_evaluation_beside_a_model_or_a_run_is_shown_with_it(tmp_path, probed, make_evaluation, make_run):
    model = tmp_path / "model"
    make_evaluation(model / "evaluation", {"small": 0.0})
    assert read_folder(model).kind == "evaluation"
    shutil.copy(probed[1] / "probe.json", model)
    found = read_folder(model)
    assert (found.kind, len(found.probes), len(found.evaluations)) == ("model", 1, 1)
    page = build_report(model).read_text()
    assert "What the queries learned" in page
    assert 'href="../evaluation/small/piqa.items.jsonl"' in page
    run = make_run(tmp_path / "run", name="my run", steps=100)
    make_evaluation(run / "evaluation", {"run": 0.0})
    assert [one.label for one in read_folder(run).evaluations] == ["my run"]


def test_a_damaged_evaluation_is_named_in_one_line(pair, tmp_path):
    content = json.loads((pair / "evaluation.json").read_text())
    for change, fault in (
        ({"models": []}, r"models is a list; wanted an object"),
        ({"models": {}}, r"models is empty"),
        ({"comparisons": [{"baseline": "a"}]}, r"comparisons\[0\]\.candidate is missing"),
        ({"models": {"a": {}}}, r"models\.a\.settings is missing"),
        (
            {"comparisons": [{"baseline": "plain", "candidate": "lost", "tasks": []}]},
            r"a comparison is with lost, which is not among the models",
        ),
        (
            {"comparisons": [{"baseline": "plain", "candidate": "routed", "tasks": [], "left_out": "piqa"}]},
            r"left_out is a text; wanted a list",
        ),
    ):
        (tmp_path / "evaluation.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=rf"has nothing to show; evaluation\.json: damaged \({fault}\)"):
            build_report(tmp_path)


def test_names_of_models_and_tasks_are_text(pair, tmp_path):
    evil = "<script>alert(1)</script>"
    content = (pair / "evaluation.json").read_text().replace('"routed"', json.dumps(evil))
    (tmp_path / "evaluation.json").write_text(content.replace("hellaswag", evil))
    page = build_report(tmp_path).read_text()
    assert evil not in page
    assert page.count("&lt;script&gt;alert(1)") > 5

"""Saved models through lm-eval: the same numbers as its own, kept task by task, compared on the same items."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from depthroute.evaluation import evaluate_folders, harness, local_tasks, readers
from depthroute.evaluation.results import RECORD, TABLE
from depthroute.evaluation.saved import _names
from depthroute.evaluation.scores import compare_models

ADDITIVE = {"scheme": "additive"}
MHAR = {"scheme": "mhar", "num_heads": 2}
CHOICES = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "wikitext"]


def items(folder, model, task):
    return [json.loads(line) for line in (folder / model / f"{task}.items.jsonl").read_text().splitlines()]


def log_likelihoods(item):
    return torch.tensor(
        [response[0][0] if isinstance(response[0], list | tuple) else response[0] for response in item["resps"]]
    )


@pytest.fixture
def evaluate(data_root, tmp_path):
    def run(*folders, tasks=("piqa",), out="out", **options):
        evaluate_folders(folders, tasks, data_root=data_root, out=tmp_path / out, **options)
        return tmp_path / out

    return run


def test_the_numbers_are_those_of_lm_eval_on_the_stock_model(evaluate, save, tmp_path):
    """The same weights, once through `depthroute evaluate`, once as a stock model through lm-eval itself."""
    from depthroute import convert_checkpoint

    stock = save("stock")
    ours = tmp_path / "ours"
    convert_checkpoint(stock, residual=ADDITIVE).save_pretrained(ours)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (ours / name).write_bytes((stock / name).read_bytes())
    out = evaluate(ours, tasks=CHOICES, batch_size=2)
    theirs = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(stock), "dtype": "float32"},
        tasks=CHOICES,
        batch_size=2,
        device="cpu",
        task_manager=TaskManager(include_path=out / "tasks", include_defaults=False),
        bootstrap_iters=0,
    )
    for task in CHOICES:
        found = items(out, "ours", task)
        assert len(found) == len(theirs["samples"][task]) == 2
        for mine, other in zip(found, theirs["samples"][task], strict=True):
            assert mine["doc_hash"] == other["doc_hash"]
            torch.testing.assert_close(log_likelihoods(mine), log_likelihoods(other), atol=1e-4, rtol=0)
            for metric in other["metrics"]:
                assert mine[metric] == pytest.approx(other[metric], rel=1e-5)


def test_the_batch_size_changes_nothing(evaluate, save):
    model = save("model", MHAR)
    first = evaluate(model, tasks=CHOICES, batch_size=1, out="one")
    second = evaluate(model, tasks=CHOICES, batch_size=8, out="eight")
    for task in CHOICES:
        for one, eight in zip(items(first, "model", task), items(second, "model", task), strict=True):
            torch.testing.assert_close(log_likelihoods(one), log_likelihoods(eight), atol=1e-4, rtol=0)
    record = json.loads((second / RECORD).read_text())["models"]["model"]
    assert record["dtype"] == "float32"
    assert (record["settings"]["batch_size"], record["settings"]["max_length"]) == (8, 512)


def test_two_models_are_compared(evaluate, save, capsys):
    out = evaluate(save("one", MHAR, 0), save("two", MHAR, 1), tasks=["piqa", "arc_easy", "wikitext"])
    (comparison,) = json.loads((out / RECORD).read_text())["comparisons"]
    assert (comparison["baseline"], comparison["candidate"]) == ("one", "two")
    tests = {task["task"]: task["test"] for task in comparison["tasks"]}
    assert tests == {
        "piqa acc_norm": "mcnemar",
        "arc_easy acc_norm": "mcnemar",
        "wikitext log word_perplexity": "bootstrap",
    }
    table = (out / TABLE).read_text()
    assert "## two against one" in table
    assert "p (Holm)" in table
    assert "one: piqa (1 of 3)" in capsys.readouterr().err
    perplexity = json.loads((out / "one/wikitext.json").read_text())["metrics"]["word_perplexity,none"]
    (wikitext,) = (task for task in comparison["tasks"] if task["test"] == "bootstrap")
    assert torch.tensor(wikitext["baseline"]).exp().item() == pytest.approx(perplexity, rel=1e-4)


def test_models_of_other_dtypes_are_compared_and_the_table_says_so(evaluate, save):
    one, two = save("one", MHAR), save("two", MHAR, 1)
    AutoModelForCausalLM.from_pretrained(two, dtype=torch.bfloat16).save_pretrained(two)
    said = "- other dtypes: one float32, two bfloat16, which may be part of a difference; --dtype runs both in one\n"
    assert said in (evaluate(one, two) / TABLE).read_text()
    assert "other dtypes" not in (evaluate(one, two, out="alike", dtype="float32") / TABLE).read_text()


def test_models_with_different_items(evaluate, save, tmp_path):
    one, two = save("one", MHAR), save("two", MHAR, 1)
    evaluate(one)
    file = tmp_path / "out/one/piqa.items.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="items of task 'piqa acc_norm': one lacks 1 of the 2 that two has"):
        evaluate(one, two)


def test_math_with_both_checkers(evaluate, save, monkeypatch):
    monkeypatch.setattr(
        harness, "load_model", lambda *_: Stub(["The answer is $2$. Final Answer: it is $\\boxed{2}$."])
    )
    out = evaluate(save("model", MHAR), tasks=["minerva_math_algebra"])
    (found,) = items(out, "model", "minerva_math_algebra")
    assert (found["exact_match"], found["math_verify"]) == (0, 1)
    assert json.loads((out / "model/minerva_math_algebra.json").read_text())["shots"] == 4


def test_a_group_is_compared_as_a_whole():
    """Two tasks of one item each: what is compared are the two items of the group."""
    one = {"pair": {"algebra": [_item(1)], "geometry": [_item(1)]}}
    two = {"pair": {"algebra": [_item(1)], "geometry": [_item(0)]}}
    (pair,) = compare_models(("one", one), ("two", two)).tasks
    assert (pair.task, pair.items, pair.only_baseline, pair.only_candidate) == ("pair exact_match", 2, 1, 0)


def _item(right):
    return {"doc_id": 0, "doc_hash": "h", "filter": "none", "metrics": ["exact_match"], "exact_match": right}


def test_it_goes_on_where_it_stopped(evaluate, save, monkeypatch, tmp_path):
    model = save("model", MHAR)
    whole = evaluate(model, tasks=["piqa", "arc_easy"], out="whole")
    real, calls = harness.lm_evaluate, []

    def stopping(lm, loaded, **options):
        calls.extend(loaded["tasks"])
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(lm, loaded, **options)

    monkeypatch.setattr(harness, "lm_evaluate", stopping)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tasks=["piqa", "arc_easy"])
    assert not (tmp_path / "out" / RECORD).exists()
    evaluate(model, tasks=["piqa", "arc_easy"])
    assert calls == ["piqa", "arc_easy", "arc_easy"]
    assert (tmp_path / "out" / TABLE).read_text() == (whole / TABLE).read_text()


def test_other_settings_are_not_mixed(evaluate, save):
    model = save("model", MHAR)
    evaluate(model, limit=1)
    with pytest.raises(ValueError, match="holds results for limit 1, this is 2"):
        evaluate(model, limit=2)


def test_results_are_those_of_one_configuration(evaluate, save, monkeypatch):
    """The heads of a route are in config.json alone: no weight has another shape with another number of them."""
    model = save("model", MHAR)
    first = (evaluate(model, tasks=["wikitext"]) / TABLE).read_text()
    file = model / "config.json"
    text = file.read_text()
    config = json.loads(text)
    config["residual"]["num_heads"] = 1
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds results for config"):
        evaluate(model, tasks=["wikitext"])
    assert (evaluate(model, tasks=["wikitext"], out="other") / TABLE).read_text() != first
    file.write_text(text)
    monkeypatch.setattr(harness, "load_model", lambda *_: pytest.fail("what is finished is not run again"))
    assert (evaluate(model, tasks=["wikitext"]) / TABLE).read_text() == first


def test_scores_that_are_not_finite_are_shown_and_not_compared(evaluate, save):
    good, bad = save("good", MHAR), save("bad", MHAR, 1)
    weights = load_file(bad / "model.safetensors")
    broken = {name: torch.full_like(weight, float("nan")) for name, weight in weights.items()}
    save_file(broken, bad / "model.safetensors", {"format": "pt"})
    note = "- wikitext has no finite word_perplexity (nan), byte_perplexity (nan), bits_per_byte (nan): look at"
    out = evaluate(bad, tasks=["wikitext", "piqa"])
    for text in ((out / TABLE).read_text(), (bad / "README.md").read_text()):
        assert "| wikitext | 0 | 2 | word_perplexity | nan |  |" in text
        assert note in text
    hub = (bad / "README.md").read_text().partition("# bad")[0]
    assert "piqa" in hub
    assert "wikitext" not in hub
    both = (evaluate(good, bad, tasks=["wikitext", "piqa"]) / TABLE).read_text()
    sentence = "wikitext log word_perplexity is not compared: the scores of bad on 2 of 2 items are not finite (nan)"
    assert f"\n- {sentence}\n" in both
    assert "| piqa acc_norm | 2 |" in both
    record = json.loads((out / RECORD).read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record["comparisons"][0]["left_out"] == [sentence]
    assert [task["task"] for task in record["comparisons"][0]["tasks"]] == ["piqa acc_norm"]


def test_models_without_a_task_to_compare_have_no_table_of_differences(evaluate, save):
    good, bad = save("good", MHAR), save("bad", MHAR, 1)
    weights = load_file(bad / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, bad / "model.safetensors", {"format": "pt"})
    _, found, differences = (evaluate(good, bad, tasks=["wikitext"]) / TABLE).read_text().split("\n## ")
    assert found.startswith("bad\n")
    assert differences == (
        "bad against good\n\n- wikitext log word_perplexity is not compared: "
        "the scores of bad on 2 of 2 items are not finite (nan)\n"
    )


@pytest.mark.parametrize("strange", ["nan", float("nan")])  # as it is saved, and as it is
def test_one_item_that_is_not_finite_leaves_its_task_out_alone(strange):
    fine = {"a": {"a": [_item(1)]}, "b": {"b": [_item(0)]}}
    found = compare_models(("one", fine), ("two", {**fine, "b": {"b": [_item(strange)]}}))
    assert [task.task for task in found.tasks] == ["a exact_match"]
    assert found.left_out == ("b exact_match is not compared: the scores of two on 1 of 1 items are not finite (nan)",)
    assert found.tasks == compare_models(("one", {"a": fine["a"]}), ("two", {"a": fine["a"]})).tasks


def test_perplexities_of_two_models_that_are_not_finite():
    def pages(*values):
        shared = {"doc_hash": "h", "filter": "none", "metrics": ["word_perplexity"]}
        return {"w": {"w": [{**shared, "doc_id": i, "word_perplexity": [v, 5]} for i, v in enumerate(values)]}}

    found = compare_models(("one", pages("-inf", -20.0)), ("two", pages("nan", "-inf")))
    assert found.tasks == ()
    assert found.left_out == (
        "w log word_perplexity is not compared: the scores of one on 1 of 2 items are not finite (inf), "
        "the scores of two on 2 of 2 items are not finite (inf or nan)",
    )


def test_answers_that_are_shuffled_are_shuffled_alike(evaluate, save, data_root, monkeypatch):
    """GPQA's own definition draws the order of the answers from the global generator."""
    answers = ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    questions = [{"Question": f"{n}?", **{key: f"{key} {n}" for key in answers}} for n in range(9)]
    (data_root / "gpqa.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    task = local_tasks.LocalTask({"train": ("gpqa.jsonl", readers.json_lines)})
    monkeypatch.setitem(local_tasks._TASKS, "gpqa_main_zeroshot", task)
    monkeypatch.setattr(local_tasks, "_FOLDERS", "gpqa/zeroshot")
    model, orders = save("model", MHAR), []
    for seed in (1, 2):
        random.seed(seed)
        out = evaluate(model, tasks=["gpqa_main_zeroshot"], out=f"out-{seed}")
        found = items(out, "model", "gpqa_main_zeroshot")
        assert len({item["target"] for item in found}) > 1
        orders.append([item["doc_hash"] for item in found])
    assert orders[0] == orders[1]


class Stub(LM):
    """A model that gives prepared answers."""

    def __init__(self, answers):
        super().__init__()
        self.answers, self.model = list(answers), SimpleNamespace(dtype=torch.float32)
        self._device = torch.device("cpu")

    def generate_until(self, requests, disable_tqdm=False):
        return [self.answers[request.doc_id] for request in requests]

    loglikelihood = loglikelihood_rolling = None


ANSWERS = {
    "gsm8k": (" 3 + 4 = 7 cups.\n#### 7", " So many plums.\n#### 11"),
    "humaneval": ("    return 2 * x\n", "    return xs[1]\n"),
    "mbpp": ("def add(x):\n    return x + 11\n", "while True:\n    pass\n"),
}


@pytest.mark.parametrize("task", ANSWERS)
def test_a_right_answer_and_a_wrong_one(task, evaluate, save, monkeypatch, sandbox):
    monkeypatch.setattr(harness, "load_model", lambda *_: Stub(ANSWERS[task]))
    if task == "mbpp":
        monkeypatch.setattr("depthroute.evaluation.code_scorer.Limits", lambda: harness_limits())
    out = evaluate(save("model", MHAR), tasks=[task], allow_code=True)
    found = [item for item in items(out, "model", task) if item["filter"] != "flexible-extract"]
    assert [item[item["metrics"][0]] for item in found] == [1.0, 0.0]


def harness_limits():
    from depthroute.evaluation.sandbox import Limits

    return Limits(seconds=1.0)


@pytest.mark.parametrize("task", ["humaneval", "mbpp"])
def test_generated_code_is_run_only_when_it_is_allowed(task, evaluate, save):
    with pytest.raises(ValueError, match=f"{task} runs code that the model generates; --allow-code"):
        evaluate(save("model", MHAR), tasks=[task])


def test_without_a_tokenizer(evaluate, save):
    folder = save("model", MHAR)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer beside it"):
        evaluate(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["hellaswog"]}, "did you mean 'hellaswag'"),
        ({"tasks": []}, "tasks: there are none"),
        ({"dtype": "float8"}, "dtype: unknown 'float8'"),
        ({"batch_size": 0}, "batch_size is 0; wanted at least 1"),
        ({"limit": 0}, "limit is 0; wanted at least 1"),
    ],
)
def test_mistakes(options, message, evaluate, save):
    with pytest.raises(ValueError, match=message):
        evaluate(save("model", MHAR), **options)


def test_no_model_and_a_model_twice(evaluate, save, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model in"):
        evaluate(tmp_path)
    model = save("model", MHAR)
    with pytest.raises(ValueError, match="is given twice"):
        evaluate(model, model)


def test_the_card_of_the_model_has_the_scores(evaluate, save):
    model, stock = save("model", MHAR), save("stock")
    evaluate(model, stock, tasks=["piqa", "boolq"])
    card = (model / "README.md").read_text()
    assert "| piqa | 0 | 2 | acc |" in card
    assert "boolq: the passages are missing" in card
    assert "model-index:" in card
    assert card.startswith("---\n")
    evaluate(model, tasks=["arc_easy"], limit=1, out="part")
    card = (model / "README.md").read_text()
    assert card.count("## Evaluation") == 1
    assert "only the first 1 items" in card
    assert "model-index:" not in card
    assert not (stock / "README.md").exists()


def test_models_go_by_the_shortest_names_that_tell_them_apart():
    runs = Path("/runs")
    assert _names([runs / "a" / "final", runs / "b"]) == ["a", "b"]
    assert _names([runs / "a" / "final", runs / "a" / "final-ema"]) == ["a", "a-ema"]
    assert _names([runs / arm / "seed-0" / "final" for arm in ("a", "b")]) == ["a-seed-0", "b-seed-0"]

import json

import pytest

from depthroute.studies import quickstart
from depthroute.studies.study import load_study, runs
from depthroute.training.shipped import recipe_folder


@pytest.fixture
def quick(fake, tmp_path, monkeypatch):
    """Runs the quickstart in a folder with fake runs, fake text and a report that notes the sample it was given."""
    seen = {}

    def build_report(folder):
        seen["samples"] = json.loads((folder / "samples.json").read_text())
        return folder / "report" / "index.html"

    def generate_text(folder, prompt, max_new_tokens):
        seen["model"] = folder.relative_to(tmp_path).as_posix()
        return f" and {max_new_tokens} more words"

    monkeypatch.setattr(quickstart, "run_study", lambda source, out, workers, report, console: fake.study(out, source))
    monkeypatch.setattr(quickstart, "build_report", build_report)
    monkeypatch.setattr(quickstart, "generate_text", generate_text)
    return lambda: (quickstart.run_quickstart(tmp_path, console=fake.console), seen)


def test_it_compares_four_arms_of_two_seeds_in_the_same_order_of_the_data():
    found = runs(load_study(recipe_folder() / "quickstart.yaml"))
    assert [run.arm for run in found[:4]] == ["additive", "hyper_connections-static", "mhar-h1", "mhar-kv"]
    assert [run.seed for run in found] == [0] * 4 + [1] * 4
    for run in found:
        unlike = {"name", "residual", "seed"}
        assert run.recipe.model_dump(exclude=unlike) == found[0].recipe.model_dump(exclude=unlike)


def test_it_needs_no_network():
    data = runs(load_study(recipe_folder() / "quickstart.yaml"))[0].recipe.data
    assert (data.train, data.tokenizer) == ("embedded", "embedded")


def test_the_arm_with_the_lowest_mean_loss_goes_on_from_the_prompt_and_the_report_shows_it(fake, quick):
    fake.losses = {"mhar-kv/seed-0": 4.6, "mhar-kv/seed-1": 4.7, "mhar-h1/seed-0": 4.5, "mhar-h1/seed-1": 4.9}
    result, seen = quick()
    assert seen["model"] == "runs/mhar-kv/seed-0"
    assert seen["samples"] == [{"arm": "mhar-kv", "prompt": quickstart.PROMPT, "text": " and 100 more words"}]
    assert result.report.name == "index.html"
    for shown in ("unigram entropy", "4.650 ± 0.071", f"{quickstart.PROMPT} and 100 more words", "Report: "):
        assert shown in fake.output


def test_away_from_a_terminal_no_line_of_the_text_is_broken(fake, quick):
    fake.console.width = 30
    quick()
    assert f"\n{quickstart.PROMPT} and 100 more words\n" in fake.output


def test_a_failed_run_is_an_error_with_its_reason(fake, quick):
    fake.fails["mhar-h1/seed-0"] = (1, "ValueError: no")
    with pytest.raises(RuntimeError, match="mhar-h1/seed-0: ValueError: no"):
        quick()

"""What the records of studies share: a folder of landed runs read with its tables made anew, its figures, its words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from depthroute.files import write_text
from depthroute.report import formats
from depthroute.report.comparison import compare
from depthroute.report.drawing import to_svg
from depthroute.report.figures import loss_curves, paired_differences
from depthroute.report.folders import Folder, Group, read_folder
from depthroute.report.style import strokes
from depthroute.studies.grid import copy_finished, study_text
from depthroute.studies.results import write_results
from depthroute.studies.statistics import PairedDifference
from depthroute.studies.study import load_study, runs


def read_study(
    source: str, results: Path, *, overrides: Iterable[str] = (), reuse: Sequence[Path] = ()
) -> tuple[Folder, dict[str, Any]]:
    """The study folder of landed runs and what its results.json says, after study.yaml, the CSV and it are made anew.

    `overrides`: with which the runs were made. `reuse`: study folders whose runs of the same recipes are copied.
    """
    study = load_study(source, overrides)
    results.mkdir(parents=True, exist_ok=True)
    write_text(results / "study.yaml", study_text(study))
    copy_finished(results, runs(study), [folder for folder in reuse if (folder / "runs").is_dir()])
    comparisons = write_results(study, runs(study), results)[1]
    return read_folder(results), comparisons


def draw(group: Group, figures: Path, suffix: str = "") -> None:
    """Write loss.svg and difference.svg of the runs of a group into a folder, where there is something to show."""
    colours = strokes(group.arms, group.baseline)
    figures.mkdir(parents=True, exist_ok=True)
    drawn = {
        "loss": loss_curves(group, colours, compare(group).unigram_entropy),
        "difference": paired_differences(group, colours),
    }
    for name, figure in drawn.items():
        if figure is not None:
            write_text(figures / f"{name}{suffix}.svg", to_svg(figure))


def settled(difference: PairedDifference) -> str:
    """Whether a difference is more than two standard errors from zero, and what few pairs make of that."""
    if difference.standard_error is None:
        return "One pair of runs does not settle it."
    if abs(difference.mean) <= 2 * difference.standard_error:
        return "That is within two standard errors: not settled."
    text = f"That is more than two standard errors {'below' if difference.mean < 0 else 'above'} zero"
    # Two or three pairs are often that far by chance: a t-test knows.
    if difference.n == 2:
        return f"{text}, but of two pairs: not settled."
    chance = formats.p_value(difference.p) if difference.p is not None else "no test applies"
    significant = difference.p is not None and difference.p < 0.05
    return f"{text} ({chance}){'.' if significant else ': not settled at the 5 % level.'}"


def environments(folder: Folder) -> str:
    """What the finished runs ran on, in one line."""
    found: list[Mapping[str, Any]] = [run.environment for run in folder.runs if run.finished and run.environment]
    versions = {
        f"{one['devices'][0]}, Python {one['python']}, torch {one['packages']['torch']}, Triton "
        f"{one['packages']['triton']}, transformers {one['packages']['transformers']}, commit {one['commit']}"
        for one in found
    }
    return f"Ran on: {'; '.join(sorted(versions))}." if versions else ""

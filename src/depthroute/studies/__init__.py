"""Paired comparisons stated in one file: grids of runs, their statistics, compute-equivalent gains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthroute.studies.grid import StudyResult, run_study
    from depthroute.studies.planning import Plan, plan
    from depthroute.studies.study import Study, load_study

__all__ = ["Plan", "Study", "StudyResult", "load_study", "plan", "run_study"]

_PLACES = {
    "Plan": "planning",
    "Study": "study",
    "StudyResult": "grid",
    "load_study": "study",
    "plan": "planning",
    "run_study": "grid",
}


def __getattr__(name: str) -> Any:
    # Who wants the statistics alone, or is a worker that has yet to lock its run, does not wait for the Trainer.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"depthroute.studies.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

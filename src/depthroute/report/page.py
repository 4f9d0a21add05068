"""The report page: one HTML file that needs nothing beside it, and the files that its numbers and figures come from."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from depthroute.files import write_text
from depthroute.report import formats
from depthroute.report.evaluation_parts import evaluation_part
from depthroute.report.folders import read_folder
from depthroute.report.plates import Plates
from depthroute.report.probe_parts import probe_part
from depthroute.report.run_parts import run_sections
from depthroute.report.settings import evaluation_settings, probe_settings, settings
from depthroute.report.style import strokes

_FILTERS = (
    formats.loss,
    formats.signed,
    formats.decimals,
    formats.score,
    formats.count,
    formats.amount,
    formats.memory,
    formats.duration,
    formats.p_alone,
    formats.unbroken,
)


def build_report(folder: str | Path) -> Path:
    """Writes `report/index.html` into the folder of a run or study, finished or not, an evaluation or a probe.

    Returns its path. Beside it: `figures/*.svg`, every figure as a file, and for runs `numbers.json`, every computed
    number in full precision.
    Raises FileNotFoundError if there is no such folder, ValueError if it is none of these.
    """
    contents = read_folder(folder)
    out = contents.path / "report"
    plates = Plates(out)
    baseline = next((group.baseline for group in contents.groups if group.baseline is not None), None)
    colours = strokes(contents.arms, baseline)
    sections = run_sections(contents, colours, plates)
    mapped = any(maps.plates for section in sections for maps in section.maps)
    probes = [probe_part(probe, index, plates, with_maps=not mapped) for index, probe in enumerate(contents.probes, 1)]
    evaluations = [evaluation_part(one, index, plates) for index, one in enumerate(contents.evaluations, 1)]
    script = _script()
    page = (
        _templates(out)
        .get_template("page.html")
        .render(
            folder=contents,
            sections=sections,
            probes=probes,
            evaluations=evaluations,
            strokes=colours,
            settings=settings(contents),
            probe_settings=probe_settings,
            evaluation_settings=evaluation_settings,
            script=Markup(script),
            script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        )
    )
    if sections:
        numbers = {"name": contents.name, "comparisons": [asdict(section.comparison) for section in sections]}
        write_text(out / "numbers.json", json.dumps(numbers, indent=2) + "\n")
    write_text(out / "index.html", page)
    plates.remove_others()
    return out / "index.html"


def _script() -> str:
    """The one script that the page has, and that its content security policy lets run."""
    return (files("depthroute.report") / "templates" / "sort.js").read_text(encoding="utf-8")


def _templates(out: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("depthroute.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in _FILTERS:
        environment.filters[write.__name__] = write
    environment.filters["link"] = lambda path: quote(os.path.relpath(path, out).replace(os.sep, "/"))
    environment.filters["label"] = lambda path: Path(os.path.relpath(path, out.parent)).as_posix()
    return environment

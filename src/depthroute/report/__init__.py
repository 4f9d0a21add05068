"""One self-contained HTML page for a run or a study, with its figures as files."""

try:
    import jinja2 as _jinja2  # noqa: F401
    import matplotlib as _matplotlib  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"depthroute.report needs {error.name}: pip install 'depthroute[report]'", name=error.name
    ) from error

from depthroute.report.page import build_report

__all__ = ["build_report"]

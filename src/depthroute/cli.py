"""The command line: parse, call, print. The work is done by the packages that each command names."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

app = typer.Typer(
    name="depthroute",
    help="Multi-head attention residuals: train, compare and look at models that route through depth.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Overrides = Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Recipe fields to change.")]  # noqa: UP045
Out = Annotated[Optional[Path], typer.Option(help="Folder for the results; runs/NAME by default.")]  # noqa: UP045


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/quickstart"),
) -> None:
    """Train four residual schemes on a small embedded corpus, compare them, write a report, generate text."""
    load("studies.quickstart", extra="train,report").run_quickstart(out)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    overrides: Overrides = None,
    out: Out = None,
) -> None:
    """Train one model. Run it again to go on where it stopped."""
    training = load("training", extra="train")
    resolved = training.load_recipe(recipe, overrides or ())
    folder = out or Path("runs") / resolved.name
    summary = training.train(resolved, folder)
    typer.echo(
        f"held-out loss {summary['final_loss']:.4f} after {summary['tokens']:,} tokens; everything is in {folder}"
    )


@app.command()
def study(
    path: Annotated[Path, typer.Argument(help="A study file.")],
    out: Out = None,
    workers: Annotated[Optional[int], typer.Option(help="Runs at a time; one for each GPU by default.")] = None,  # noqa: UP045
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the study needs, run nothing.")] = False,
) -> None:
    """Run a grid of paired runs. Run it again to finish what is unfinished."""
    studies = load("studies", extra="train,report")
    if dry_run:
        typer.echo(studies.plan(path))
        return
    studies.run_study(path, out, workers=workers)


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run or of a study.")]) -> None:
    """Write one self-contained HTML page about a run or a study."""
    typer.echo(load("report", extra="report").build_report(folder))


@app.command()
def generate(
    folder: Annotated[str, typer.Argument(help="A saved model: a folder or a name on the hub.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus to sample from.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
) -> None:
    """Generate text from a saved model."""
    text = load("models.text").generate_text(
        folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    typer.echo(text)


def load(module: str, extra: str | None = None) -> Any:
    """Import `depthroute.<module>`; where a package of an extra is missing, say how to install it."""
    try:
        return importlib.import_module(f"depthroute.{module}")
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("depthroute"):
            raise
        raise RuntimeError(
            f"this command needs the package {error.name!r}: pip install 'depthroute[{extra}]'"
        ) from error


def main() -> None:
    """Run the command line. An error is one line and exit code 1; DEPTHROUTE_DEBUG=1 shows where it came from."""
    try:
        app()
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        if os.environ.get("DEPTHROUTE_DEBUG"):
            raise
        typer.echo(f"depthroute: error: {' '.join(str(error).split())}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()

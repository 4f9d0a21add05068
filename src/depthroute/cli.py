"""The command line: parse, call, print. The work is done by the packages that each command names."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from depthroute.errors import in_one_line, nearest
from depthroute.files import new_folder

BENCHES = {
    "route": "All depth reads of one microbatch, beside plain PyTorch and other packages.",
    "train": "Whole training steps of several schemes side by side.",
    "decode": "Generation: milliseconds a token, and of the prompt before it.",
    "scale": "Training steps on one GPU and on all of them, started by torchrun.",
}

app = typer.Typer(
    name="depthroute",
    help="Multi-head attention residuals: train, compare and look at models that route through depth.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/quickstart"),
) -> None:
    """Train four residual schemes on a small embedded corpus, compare them, write a report, generate text."""
    load("studies.quickstart", extra="train,report").run_quickstart(new_folder(out, "--out"))


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME by default.")] = None,
) -> None:
    """Train one model. Run it again to go on where it stopped."""
    training = load("training", extra="train")
    resolved = training.load_recipe(recipe, overrides or ())
    folder = new_folder(out or Path("runs") / resolved.name, "--out")
    summary = training.train(resolved, folder)
    if os.environ.get("RANK", "0") == "0":  # of those that torchrun may have started
        typer.echo(
            f"held-out loss {summary['final_loss']:.4f} after {summary['tokens']:,} tokens; all of it is in {folder}"
        )


@app.command()
def study(
    path: Annotated[str, typer.Argument(help="A study file, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Fields to change.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the study; runs/NAME by default.")] = None,
    workers: Annotated[int | None, typer.Option(help="Runs at a time; one on each GPU by default.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="An arm to run now; give it once for each arm.")] = None,
    reuse: Annotated[list[Path] | None, typer.Option(help="A study whose runs of the same recipes are taken.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the study needs, and run nothing.")] = False,
    rate: Annotated[float | None, typer.Option(help="Tokens a second, for --dry-run.")] = None,
) -> None:
    """Run a grid of paired runs. Run it again to finish what is unfinished."""
    studies = load("studies", extra="train,report")
    if dry_run:
        checked = {"only": only or (), "workers": workers, "reuse": reuse or (), "out": out}
        typer.echo(studies.plan(path, rate, overrides or (), **checked))
        return
    if rate is not None:
        raise ValueError(f"rate: got {rate:g}, but only a dry run takes a speed; add --dry-run")
    folder = new_folder(out or Path("runs") / studies.load_study(path, overrides or ()).name, "--out")
    result = studies.run_study(path, folder, workers, overrides=overrides or (), only=only or (), reuse=reuse or ())
    if result.failed:
        raise RuntimeError(f"{len(result.failed)} runs failed; their reasons are in {folder / 'results.csv'}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A pretrained checkpoint: a folder, a GGUF file or a hub name.")],
    destination: Annotated[Path, typer.Argument(help="A new folder.")],
    scheme: Annotated[str, typer.Option(help="Residual scheme.")] = "delta_mhar",
    num_heads: Annotated[str | None, typer.Option(help="Route heads: a number, or kv.")] = None,
    block_layers: Annotated[int | None, typer.Option(help="Layers in a block, where the scheme has blocks.")] = None,
    read_scale: Annotated[str | None, typer.Option(help="sum, which starts as the original, or mean.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float64, float32, float16 or bfloat16; the source's by default.")
    ] = None,
    check: Annotated[bool, typer.Option(help="Run both models on text and write down how far they are apart.")] = True,
) -> None:
    """Graft routing onto a pretrained checkpoint, and show that it still computes what it did."""
    folder = load("convert.folder")
    heads = int(num_heads) if num_heads is not None and num_heads.isdecimal() else num_heads
    options = {"num_heads": heads, "block_layers": block_layers, "read_scale": read_scale}
    residual = {"scheme": scheme, **{key: value for key, value in options.items() if value is not None}}
    typer.echo(folder.describe_conversion(folder.convert_folder(source, destination, residual, dtype, check)))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The folder of a run, study, evaluation or probe.")]) -> None:
    """Write one self-contained HTML page about a run, a study, an evaluation or a probe."""
    typer.echo(load("report", extra="report").build_report(folder))


@app.command()
def probe(
    folder: Annotated[Path, typer.Argument(help="A saved model, or the folder of a run.")],
    text: Annotated[list[str] | None, typer.Option(help="Text files; the embedded held-out books by default.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="How many tokens to read.")] = 65536,
    out: Annotated[Path | None, typer.Option(help="File for the result; probe.json in the folder by default.")] = None,
) -> None:
    """Look at what the queries of a model have learned."""
    probing = load("probing", extra="train")
    probing.print_probe(probing.probe_folder(folder, text=text, tokens=tokens, out=out))


@app.command()
def evaluate(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Saved models, or folders of runs.")],
    tasks: Annotated[str, typer.Option(help="Names of lm-eval's tasks, groups and tags, with commas.")],
    data_root: Annotated[Path | None, typer.Option(help="Read the tasks from local files in this folder.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first items of each task.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; what was saved by default.")] = "auto",
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run generated code, in a sandbox.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; in the model's by default.")] = None,
) -> None:
    """Score saved models by lm-eval, and compare each with the first. Run it again to finish what is unfinished."""
    evaluation = load("evaluation.harness", extra="eval")
    folder = evaluation.evaluate_folders(
        folders,
        [name.strip() for name in tasks.split(",") if name.strip()],
        data_root=data_root,
        limit=limit,
        batch_size=batch_size,
        dtype=dtype,
        allow_code=allow_code,
        out=out,
    )
    typer.echo((folder / evaluation.TABLE).read_text(encoding="utf-8"))


@app.command()
def generate(
    folder: Annotated[str, typer.Argument(help="A saved model: a folder, or a name on the hub.")],
    prompt: Annotated[str, typer.Option(help="The text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="How many tokens to generate.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus to sample from.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Generate text from a saved model: prints the prompt and how it goes on."""
    text = load("models.text").generate_text(
        folder, prompt, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    typer.echo(prompt + text)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(
    context: typer.Context,
    what: Annotated[str | None, typer.Argument(help="route, train, decode or scale.")] = None,
) -> None:
    """Measure all reads of a microbatch (route), training steps (train), generation (decode), several GPUs (scale)."""
    if what in (None, "--help", "-h"):
        typer.echo(bench_help())
        return
    if what not in BENCHES:
        raise ValueError(f"bench: unknown benchmark {what!r}{nearest(what, BENCHES)}")
    load(f"bench.{what}").main(context.args)


def bench_help() -> str:
    """What `depthroute bench` can measure; the options of each are those of its own module."""
    lines = "\n".join(f"  {name:8s}{what}" for name, what in BENCHES.items())
    return (
        "Usage: depthroute bench BENCHMARK [OPTIONS]\n\n"
        f"  Measure speed and memory on your GPUs, after a check of correctness.\n\nBenchmarks:\n{lines}\n\n"
        "`depthroute bench BENCHMARK --help` lists the options of one."
    )


def load(module: str, extra: str | None = None) -> Any:
    """Import `depthroute.<module>`; where a package of an extra is missing, say how to install it.

    Away from a terminal transformers then shows no bars, of which nothing would be left but their pieces.
    """
    try:
        found = importlib.import_module(f"depthroute.{module}")
    except ModuleNotFoundError as error:
        if extra is None or (error.name or "").startswith("depthroute"):
            raise
        raise RuntimeError(
            f"this command needs the package {error.name!r}: pip install 'depthroute[{extra}]'"
        ) from None
    if "transformers" in sys.modules and not sys.stderr.isatty():
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    return found


def main() -> None:
    """Run the command line. An error is one line and exit code 1; DEPTHROUTE_DEBUG=1 shows where it came from."""
    in_one_line(app)


if __name__ == "__main__":
    main()

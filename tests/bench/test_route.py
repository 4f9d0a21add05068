"""What `bench route` says about correctness and bytes; the times need a GPU."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace

import pytest
import torch
from torch._inductor import config as inductor_config

from depthroute.bench import chains, peers, route, timing
from depthroute.bench.chains import Shape
from depthroute.bench.timing import Times
from depthroute.ops.two_phase.plan import Plan

SMALL = Shape(sites=7, tokens=5, width=24, heads=2)
PLAIN = functools.partial(chains.with_engine, kernels=False)


def test_a_right_chain_is_green_with_errors_near_the_reference():
    found = route.check(SMALL, torch.float32, PLAIN, device="cpu")
    assert found["green"]
    assert found["equal_runs"]
    assert set(found["errors"]) == {"output", "input gradient", "query gradients", "norm weight gradients"}
    assert all(pair["ours"] < 1e-5 for pair in found["errors"].values())


def test_a_wrong_chain_is_not_green():
    assert not route.check(SMALL, torch.float32, lambda chain: PLAIN(chain) * 1.001, device="cpu")["green"]
    assert not route.check(SMALL, torch.float32, lambda chain: PLAIN(chain) * float("nan"), device="cpu")["green"]


def test_every_arm_runs_the_same_chain():
    chain = chains.make_chain(SMALL, torch.float64, "cpu")
    expected = chain.double().step(route.runner("reference", SMALL))

    def stacked(sources, site, heads):
        return chains.stacked_read(torch.stack(list(sources)), site.query, site.norm_weight, heads)

    for run in (PLAIN, route._compiled(PLAIN), functools.partial(chains.with_reads, read=stacked)):
        for actual, wanted in zip(chain.double().step(run), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_a_compiled_chain_is_one_graph_for_any_number_of_tokens():
    torch._dynamo.reset()
    run = route._compiled(PLAIN)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (5, 9):
            chain = chains.make_chain(SMALL, torch.float64, "cpu", tokens=tokens)
            for actual, wanted in zip(chain.step(run), chain.step(PLAIN), strict=True):
                torch.testing.assert_close(actual, wanted)


def test_rows_are_counted_by_hand_for_two_tiles():
    # Sites 0 1 | 2 3. Forward: merges 1+1, 2+1, then 2+3 partials and mixes with 1+2 sources; the inter read 2+2.
    # Backward, merges: (2, source, its sum so far, its gradient) 5, and 8; in the last tile 2+1+1+1 and a partial's
    # gradient, 6 with the sum that site 3 sends, 2+2+2+1 = 7; the inter read 2+2 and 2 written, no sums yet.
    assert chains.engine_rows(Plan(4, (0, 2))) == (2 + 3 + 3 + 4 + 4) + (4 + 7 + 6 + 7 + 6)


def test_the_table_gives_no_number_for_what_is_not_green():
    row = {"shape": "100m", "arm": "engine", "check": route.check(SMALL, torch.float32, lambda c: 2 * PLAIN(c), "cpu")}
    text = route.table([row, {"shape": "1b", "arm": "compiled", "skipped": "not measured: over 90 s"}])
    assert "no numbers: errors too large" in text
    assert "over 90 s" in text


def test_peers_are_named_together_and_run_last():
    assert route.named_arms(["fast-attnres", "engine"]) == ["engine", "fast-attnres"]
    assert route.named_arms(["peers", "engine"]) == ["engine", *peers.PEERS]


@pytest.mark.parametrize(
    ("arm", "shape", "why"),
    [
        ("liger-kernel", "1b", "single-head, and the shape has H = 8"),
        ("liger-kernel", "1b-h1", "not installed: pip install liger-kernel"),
        ("compiled", "8b-delta", "gated reads have the arms engine, engine-compiled, reference"),
        ("engine", "8b-delta", None),
        ("compiled", "1b", None),
    ],
)
def test_an_arm_is_left_out_where_it_does_not_belong(monkeypatch, arm, shape, why):
    monkeypatch.setattr(peers, "version", lambda name: None)
    found = route.obstacle(arm, chains.SHAPES[shape])
    assert found is None if why is None else why in found


def test_a_sweep_refuses_gated_reads(tmp_path, capsys):
    with pytest.raises(SystemExit):
        route.main(["--out", str(tmp_path), "--sweep", "--shapes", "8b-delta"])
    assert "no gated reads" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure")
def test_without_a_gpu_it_says_so(tmp_path):
    with pytest.raises(RuntimeError, match="CUDA"):
        route.main(["--out", str(tmp_path)])


@pytest.fixture
def clocks(monkeypatch):
    """Times and memory of a device that is not there, each time longer than the one before; every call is made."""
    ticks = itertools.count(1)

    def timed(call, *_):
        call()
        return Times(*[float(next(ticks))] * 3)

    def memory(call):
        call()
        return 2**20

    monkeypatch.setattr(timing, "require_cuda", lambda: None)
    monkeypatch.setattr(timing, "environment", lambda: {"device": "none", "torch": "0"})
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 1e12)
    monkeypatch.setattr(timing, "peak_memory", memory)
    monkeypatch.setattr(timing, "eager_times", timed)
    monkeypatch.setattr(timing, "graph_times", timed)
    monkeypatch.setitem(chains.SHAPES, "small", SMALL)


@pytest.mark.usefixtures("clocks")
def test_a_run_writes_a_row_for_every_case(tmp_path, capsys):
    rows = route.run(tmp_path, ["small"], ["reference", "compiled", "liger-kernel"], "fp32", 90.0, 1.0, device="cpu")
    assert [row["arm"] for row in rows] == ["reference", "compiled", "liger-kernel"]
    assert rows[0]["graph_ms"] == {"median": 1.0, "least": 1.0, "most": 1.0}  # less the map, which is timed before
    assert "skipped" in rows[2]
    assert json.loads((tmp_path / "route.json").read_text())["rows"] == json.loads(json.dumps(rows))
    assert "reference" in capsys.readouterr().out


@pytest.mark.usefixtures("clocks")
def test_what_is_measured_was_compiled_after_all_were_checked(monkeypatch):
    made = []

    def runner(arm, shape):
        made.append(run := functools.partial(PLAIN))
        return run

    monkeypatch.setattr(route, "runner", runner)
    checked = route.Checked(route.Case("small", SMALL, torch.float32, "engine-compiled", "cpu"))
    assert checked.run is made[0]
    checked.measure(1e12)
    assert checked.run is made[1]


def test_a_compiled_arm_keeps_no_choice_of_kernels():
    with inductor_config.patch(autotune_local_cache=True):
        route._compiled(PLAIN)
        assert not inductor_config.autotune_local_cache


@pytest.mark.usefixtures("clocks")
def test_after_the_budget_no_arm_is_begun(tmp_path):
    rows = route.run(tmp_path, ["small"], ["reference"], "fp32", 0.0, 1.0, device="cpu")
    assert rows[0]["skipped"] == "not measured: over 0 s"


def test_the_first_call_has_all_tokens_so_that_a_compiler_tunes_its_kernels_for_them():
    tokens = []
    route.check(replace(SMALL, tokens=200), torch.float32, lambda c: tokens.append(len(c.x)) or PLAIN(c), device="cpu")
    assert tokens == [200, route.CHECKED_TOKENS, route.CHECKED_TOKENS]


@pytest.mark.gpu
def test_cases_in_processes_of_their_own_are_measured_in_turn(tmp_path):
    route.main(["--out", str(tmp_path), "--shapes", "100m", "--arms", "engine", "engine-compiled", "--processes"])
    rows = json.loads((tmp_path / "route.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["engine", "engine-compiled"]
    assert all(row["graph_ms"]["median"] > 0 for row in rows)


@pytest.mark.gpu
def test_all_gated_reads_in_one_compiled_graph_are_right():
    # With small reductions for each site, torch 2.11 made a graph whose gradients were NaN.
    shape = chains.SHAPES["8b-delta"]
    found = route.check(shape, torch.bfloat16, route.runner("engine-compiled", shape))
    assert found["green"], found

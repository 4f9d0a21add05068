"""What the benchmarks are asked for: senseless values name their option and stop before anything is built."""

from __future__ import annotations

import pytest

from depthroute.bench import decode, route, scale, train
from depthroute.bench.options import count, count_or_none, field, positive

WHOLE, NUMBER = "wants a whole number >= 1", "wants a number > 0"


@pytest.mark.parametrize(
    ("bench", "arguments", "said"),
    [
        (train, "--batch 0", f"--batch: got '0', {WHOLE}"),
        (train, "--length -1", f"--length: got '-1', {WHOLE}"),
        (train, "--microbatches 0", f"--microbatches: got '0', {WHOLE}"),
        (train, "--rounds 0", f"--rounds: got '0', {WHOLE}"),
        (train, "--steps 1.5", f"--steps: got '1.5', {WHOLE}"),
        (train, "--overrides num_hidden_layers", "--overrides: got 'num_hidden_layers', wants FIELD=VALUE"),
        (decode, "--batches 1 0", f"--batches: got '0', {WHOLE}"),
        (decode, "--prefill 0 8", f"--prefill: got '0', {WHOLE}"),
        (decode, "--overrides =3", "--overrides: got '=3', wants FIELD=VALUE"),
        (scale, "--batch 0", f"--batch: got '0', {WHOLE}"),
        (scale, "--length 0", f"--length: got '0', {WHOLE}"),
        (scale, "--learning-rate 0", f"--learning-rate: got '0', {NUMBER}"),
        (scale, "--learning-rate nan", f"--learning-rate: got 'nan', {NUMBER}"),
        (scale, "--loss-steps 0", f"--loss-steps: got '0', {WHOLE}"),
        (scale, "--warm-up -1", "--warm-up: got '-1', wants a whole number >= 0"),
        (scale, "--rounds 0", f"--rounds: got '0', {WHOLE}"),
        (scale, "--steps 0", f"--steps: got '0', {WHOLE}"),
        (scale, "--overrides hidden_size", "--overrides: got 'hidden_size', wants FIELD=VALUE"),
        (route, "--budget -1", f"--budget: got '-1', {NUMBER}"),
        (route, "--peer-limit inf", f"--peer-limit: got 'inf', {NUMBER}"),
    ],
)
def test_a_senseless_value_is_refused_by_name(bench, arguments, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--out", str(tmp_path / "out"), *arguments.split()])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_values_are_read():
    assert (count("3"), count_or_none("0"), positive("1e-4")) == (3, 0, 1e-4)
    assert field("hidden_size=64") == ("hidden_size", 64)
    assert field("hidden_act=gelu") == ("hidden_act", "gelu")

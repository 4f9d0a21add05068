"""`bench scale` with tiny models on the CPU: what it measures is whole, and many devices train as one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from depthroute.bench import scale
from support.small_runs import as_ranks

SHAPE = "vocab_size=64 num_hidden_layers=2 hidden_size=32 intermediate_size=48 head_dim=8 num_attention_heads=4"
SHORT = f"--device cpu --batch 1 --length 16 --rounds 2 --steps 1 --overrides {SHAPE} num_key_value_heads=4"


def measured(out: Path, *options: str, ranks: int = 2) -> dict:
    as_ranks(lambda _: scale.main(["--out", str(out), *" ".join([SHORT, *options]).split()]), ranks=ranks)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_devices_train_as_one(tmp_path, strategy):
    found = measured(
        tmp_path / "out.json", f"--scheme mhar --precision fp32 --eager --loss-steps 5 --strategy {strategy}"
    )
    one, both = found["one"], found["all"]
    assert found["largest_loss_difference"] < 2e-6
    assert len(both["losses"]) == 5
    assert (one["ranks"], both["ranks"], len(both["peak_memory"])) == (1, 2, 2)
    assert len(both["host_s_by_rank"]) == 2
    assert both["host_s_by_rank"][0] == both["host_s"]
    assert found["efficiency"] == both["tokens_per_second"] / (2 * one["tokens_per_second"])
    assert "mhar" in scale.table({"mhar": found})


@pytest.mark.parametrize("options", ["", "--checkpointing", "--checkpointing --keep-gathered"])
@pytest.mark.parametrize("scheme", ["additive", "mhar", "block_mhar:block_layers=3", "denseformer"])
def test_units_of_several_layers_train_as_one_device_does(tmp_path, scheme, options):
    deep = f"--overrides {SHAPE.replace('num_hidden_layers=2', 'num_hidden_layers=17')} num_key_value_heads=4"
    options = f"--scheme {scheme} --precision fp32 --eager --loss-steps 3 --strategy fsdp2 {options}"
    assert measured(tmp_path / "out.json", options, deep)["largest_loss_difference"] < 2e-6


def test_units_of_several_compiled_layers_train_as_one_device_does(tmp_path):
    deep = f"--overrides {SHAPE.replace('num_hidden_layers=2', 'num_hidden_layers=17')} num_key_value_heads=4"
    options = "--scheme mhar --precision fp32 --backend aot_eager --loss-steps 3 --strategy fsdp2 --keep-gathered"
    found = measured(tmp_path / "out.json", options, deep)
    assert found["largest_loss_difference"] < 2e-6
    # Attention and MLP are compiled again once they are shards.
    assert (found["graphs_ahead"], found["all"]["graphs"]) == (3, 5)


def test_a_model_that_is_never_whole_is_compiled_ahead_of_its_first_step(tmp_path):
    options = "--scheme delta_mhar:block_layers=1 --strategy fsdp2 --sharded --checkpointing --backend aot_eager"
    found = measured(tmp_path / "out.json", options, "--loss-steps 2", ranks=1)
    assert "one" not in found
    assert found["all"]["losses"][0] == pytest.approx(4.16, abs=0.1)  # log 64: its weights are those of a fresh model
    assert found["all"]["graphs"] == found["graphs_ahead"] == 3  # two layers and the loss


def test_parts_of_many_sources_are_the_same_graphs_in_all_layers(tmp_path):
    options = "--scheme mhar --strategy fsdp2 --checkpointing --backend aot_eager --loss-steps 2"
    deeper = f"--overrides {SHAPE.replace('num_hidden_layers=2', 'num_hidden_layers=3')} num_key_value_heads=4"
    found = measured(tmp_path / "out.json", options, deeper, ranks=1)
    assert found["one"]["graphs"] == found["graphs_ahead"] == 3  # attention, MLP and the loss


def test_layers_with_one_stream_are_compiled_whole(tmp_path):
    options = "--scheme additive --strategy fsdp2 --backend aot_eager --loss-steps 2"
    found = measured(tmp_path / "out.json", options, ranks=1)
    assert found["one"]["graphs"] == found["graphs_ahead"] == 3  # two layers and the loss


def test_under_ddp_a_model_is_one_graph(tmp_path):
    options = "--scheme mhar --precision fp32 --strategy ddp --backend aot_eager --loss-steps 3"
    found = measured(tmp_path / "out.json", options)
    assert found["one"]["graphs"] == found["graphs_ahead"] == found["all"]["graphs"] == 1
    assert found["largest_loss_difference"] < 2e-6


def test_shards_want_fsdp2(capsys):
    with pytest.raises(SystemExit):
        scale.parse(["--out", "x", "--sharded", "--strategy", "ddp"])
    assert "--sharded needs --strategy fsdp2" in capsys.readouterr().err

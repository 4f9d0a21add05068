import pickle
from pathlib import Path

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from depthroute.data import EpochOrder, PackedTokens
from depthroute.data.packing import TokenWriter, token_dtype

SEQUENCES = 30


@pytest.fixture
def packed(tmp_path: Path) -> PackedTokens:
    """30 sequences of 4 tokens; the first token of sequence i is 4 * i, so it tells which one an item is."""
    with TokenWriter(tmp_path / "tokens.bin", vocabulary_size=1000, max_tokens=None) as writer:
        writer.write([np.arange(4 * SEQUENCES + 3)])
    return PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(1000), sequence_length=4)


def walk(order: EpochOrder) -> list[int]:
    return [int(item["input_ids"][0]) // 4 for item in order]


def test_every_sequence_is_used_exactly_once_in_each_epoch(packed: PackedTokens) -> None:
    order = walk(EpochOrder(packed, seed=0, length=3 * SEQUENCES + 10))
    for epoch in range(3):
        assert sorted(order[epoch * SEQUENCES : (epoch + 1) * SEQUENCES]) == list(range(SEQUENCES))
    assert len(set(order[3 * SEQUENCES :])) == 10


def test_the_order_depends_on_the_seed_and_on_the_epoch_each_in_its_own_way(packed: PackedTokens) -> None:
    zero, one = (walk(EpochOrder(packed, seed=seed, length=2 * SEQUENCES)) for seed in (0, 1))
    orders = [order[start : start + SEQUENCES] for order in (zero, one) for start in (0, SEQUENCES)]
    assert len({tuple(order) for order in orders}) == 4
    assert zero == walk(EpochOrder(packed, seed=0, length=2 * SEQUENCES))


def test_the_order_of_a_seed_never_changes(packed: PackedTokens) -> None:
    """A run of another version, or the other arm of a comparison, must see the same data."""
    assert walk(EpochOrder(packed, seed=0, length=8)) == [11, 14, 17, 0, 1, 8, 10, 9]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_trains_on_the_same_sequences_on_any_number_of_ranks(
    packed: PackedTokens, ranks: int, micro_batch: int
) -> None:
    """Sharded as accelerate does it: 24 sequences a step, over `ranks` ranks, accumulated where they do not fit."""
    step_size, steps = 24, 4  # 96 items: more than three epochs, so that steps straddle epochs
    order = EpochOrder(packed, seed=3, length=step_size * steps)
    shards = []
    for rank in range(ranks):
        sampler = BatchSampler(SequentialSampler(order), micro_batch, drop_last=True)
        shards.append([index for batch in BatchSamplerShard(sampler, ranks, rank) for index in batch])
    expected = walk(order)
    per_rank = step_size // ranks
    for step in range(steps):
        indices = sorted(i for shard in shards for i in shard[step * per_rank : (step + 1) * per_rank])
        assert indices == list(range(step * step_size, (step + 1) * step_size))
        seen = sorted(int(order[i]["input_ids"][0]) // 4 for i in indices)
        assert seen == sorted(expected[step * step_size : (step + 1) * step_size])
    assert sum(map(len, shards)) == len(order)  # nothing that was tokenised is left out on any rank


def test_a_run_that_is_resumed_goes_on_with_the_very_next_sequence(packed: PackedTokens) -> None:
    whole = walk(EpochOrder(packed, seed=5, length=80))
    resumed = EpochOrder(packed, seed=5, length=80)
    assert [int(resumed[i]["input_ids"][0]) // 4 for i in range(47, 80)] == whole[47:]


def test_items_do_not_depend_on_which_were_asked_for_before(packed: PackedTokens) -> None:
    order = EpochOrder(packed, seed=5, length=90)
    whole = walk(order)
    for i in 89, 0, 31, 30, 29, 60:
        assert int(order[i]["input_ids"][0]) // 4 == whole[i]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_keep_the_order(packed: PackedTokens, workers: int) -> None:
    order = EpochOrder(packed, seed=1, length=70)
    loader = DataLoader(order, batch_size=8, num_workers=workers)
    seen = [int(row[0]) // 4 for batch in loader for row in batch["input_ids"]]
    assert seen == walk(order)


def test_a_worker_draws_its_own_permutation(packed: PackedTokens) -> None:
    order = EpochOrder(packed, seed=1, length=70)
    before = walk(order)
    again = pickle.loads(pickle.dumps(order))
    assert walk(again) == before
    assert again._permutation is not order._permutation


def test_the_end_and_bad_values_are_errors(packed: PackedTokens, tmp_path: Path) -> None:
    order = EpochOrder(packed, seed=1, length=5)
    for index in 5, -1:
        with pytest.raises(IndexError, match=f"item {index} of 5"):
            order[index]
    with pytest.raises(ValueError, match="length must not be negative, got -1"):
        EpochOrder(packed, seed=1, length=-1)
    short = PackedTokens(packed.path, dtype=packed.dtype, sequence_length=500)
    with pytest.raises(ValueError, match="packed holds 123 tokens, wanted at least one sequence of 500"):
        EpochOrder(short, seed=1, length=5)

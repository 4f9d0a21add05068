"""What a run leaves out of garbage collections, and for how long."""

import gc
from typing import Any

import pytest

from depthroute.training import garbage
from depthroute.training.garbage import FrozenHeap
from depthroute.training.trainer import train
from support.small_runs import small_recipe

NOTHING: Any = None


@pytest.fixture
def thawed():
    gc.unfreeze()  # conftest.py has frozen it
    yield
    gc.freeze()


def test_what_is_there_after_the_first_step_is_not_collected_until_the_end(thawed):
    heap = FrozenHeap()
    assert gc.get_freeze_count() == 0
    heap.on_step_end(NOTHING, NOTHING, NOTHING)
    first = gc.get_freeze_count()
    assert first > 10_000
    heap.on_step_end(NOTHING, NOTHING, NOTHING)
    assert 0 < gc.get_freeze_count() <= first  # what nobody needs any longer goes, by its references
    heap.close()
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_so(thawed):
    gc.freeze()
    before = gc.get_freeze_count()
    heap = FrozenHeap()
    heap.on_step_end(NOTHING, NOTHING, NOTHING)
    heap.close()
    assert 0 < gc.get_freeze_count() <= before


def test_a_run_freezes_the_heap_once_and_leaves_it_as_it_was(corpus, tmp_path, monkeypatch, thawed):
    counts = []
    freeze = garbage.freeze_heap
    monkeypatch.setattr(garbage, "freeze_heap", lambda: (counts.append(gc.get_freeze_count()), freeze()))
    train(small_recipe(corpus), tmp_path / "run")
    assert counts == [0]
    assert gc.get_freeze_count() == 0

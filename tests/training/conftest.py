from __future__ import annotations

import gc
from pathlib import Path

import pytest

from depthroute.training import train
from support.small_runs import small_recipe, write_checkpoint, write_corpus


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    gc.freeze()  # Trainer collects garbage at each start: half a second over all that is imported
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPTHROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock checkpoint with its tokenizer. Only to be read."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="session")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one small run that nothing interrupted. Only to be read."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    train(small_recipe(corpus), out)
    return out

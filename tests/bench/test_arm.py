"""One arm of `bench train`: its steps, and what a scheme is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.jobs import JOB
from depthroute.bench.arm import Arm, parse_scheme


def test_the_gradients_of_a_step_are_those_of_its_microbatches(monkeypatch):
    from depthroute.training import cuda_graphs

    own_gradients, copied = cuda_graphs.own_gradients, []
    monkeypatch.setattr(cuda_graphs, "own_gradients", lambda model: (copied.append(model), own_gradients(model)))
    weights = []
    for graphs in (True, False):
        arm = Arm(replace(JOB, scheme="mhar", microbatches=3, graphs=graphs))
        arm.step()
        weights.append([parameter.detach() for parameter in arm.model.parameters()])
    assert len(copied) == 1
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_schemes_are_parsed_with_their_options():
    assert parse_scheme("mhar") == {"scheme": "mhar"}
    assert parse_scheme("mhar:num_heads=1,backend=reference") == {
        "scheme": "mhar", "num_heads": 1, "backend": "reference",
    }  # fmt: skip
    with pytest.raises(ValueError, match="scheme 'mhar:num_heads': got the option 'num_heads', wants NAME=VALUE"):
        parse_scheme("mhar:num_heads")

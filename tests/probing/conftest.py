"""Models whose sources are given, so that what a probe must find is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from depthroute.residual import DepthRead


class GivenScheme(nn.Module):
    """One layer, and one read: the final one, over the sources that each token stands for."""

    num_sites = 3

    def __init__(self, read, table):
        super().__init__()
        self.given = read
        self.register_buffer("table", table)  # (N, vocabulary, D)

    def site_read(self, state, site):
        return (self.given, tuple(self.table[:, state[0]])) if site == 2 else None

    def source_names(self, site):
        return tuple(f"source {n}" for n in range(len(self.table)))

    def read(self, state, site, norm):
        return state[0], state

    def finish(self, state):
        return state[0]


class GivenDecoder(nn.Module):
    def __init__(self, read, table):
        super().__init__()
        self.residual = GivenScheme(read, table)

    def forward(self, input_ids, attention_mask, use_cache):
        self.residual.read((input_ids,), 0, None)
        self.residual.finish((input_ids,))


class GivenModel(nn.Module):
    def __init__(self, read, table):
        super().__init__()
        self.model = GivenDecoder(read, table)


@pytest.fixture(scope="session")
def given():
    """given(query, table, num_heads=1): table[n][token] is source n of a token."""

    def build(query, table, num_heads=1):
        table = torch.as_tensor(table, dtype=torch.float64)
        read = DepthRead(table.shape[-1], num_heads, eps=1e-12).double()
        with torch.no_grad():
            read.query.copy_(torch.as_tensor(query))
        return GivenModel(read, table)

    return build

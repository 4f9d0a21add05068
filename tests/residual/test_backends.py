"""One model read by one backend or another: the same numbers, to the precision of the dtype."""

from __future__ import annotations

import pytest
import torch

from support.models import gradients, in_fp64, move_off_init, routed, tokens

SCHEMES = [
    {"scheme": "mhar"},
    {"scheme": "mhar", "num_heads": 1},
    {"scheme": "mhar", "read_scale": "sum"},
    {"scheme": "block_mhar", "block_layers": 2},
    {"scheme": "delta_mhar", "block_layers": 2},
]


def name(options):
    return "-".join(str(value) for value in options.values())


def batch(device="cpu"):
    ids = tokens(length=7).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_loss_and_gradients_are_those_of_reads_one_by_one(options, backend):
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("kernels are interpreted only without a CUDA device; they are compiled in the test below")
    model, reference = (move_off_init(routed({**options, "backend": each})) for each in (backend, "reference"))
    loss, found = gradients(model, **batch())
    wanted_loss, wanted = gradients(reference, **batch())
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-5, atol=1e-6)
    for key, grad in wanted.items():
        assert (found[key] - grad).norm() <= 1e-4 * grad.norm() + 1e-8, key


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_a_source_of_another_dtype_is_refused(options, backend):
    model = move_off_init(routed({**options, "backend": backend}))
    layer = model.model.layers[1]
    inside = layer.forward

    def outside_of_autocast(*state, **arguments):
        with torch.autocast("cpu", enabled=False):
            return inside(*state, **arguments)

    layer.forward = outside_of_autocast
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"must be torch\.bfloat16"):
        model(**batch())


@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_a_norm_with_another_forward_is_called(options):
    model, reference = (move_off_init(routed({**options, "backend": each})) for each in ("auto", "reference"))
    for each in (model, reference):
        norm = each.model.layers[1].input_layernorm
        norm.forward = lambda x, inside=norm.forward: 2 * inside(x)
    torch.testing.assert_close(model(**batch()).logits, reference(**batch()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_layers_may_be_offloaded(options):
    accelerate = pytest.importorskip("accelerate")
    model = move_off_init(routed(options))
    with torch.no_grad():
        wanted = model(**batch()).logits
        for layer in model.model.layers:
            accelerate.cpu_offload(layer, execution_device=torch.device("cpu"))
        assert model.model.layers[0].input_layernorm.weight.is_meta
        torch.testing.assert_close(model(**batch()).logits, wanted, rtol=1e-4, atol=1e-5)


def parts(model, device):
    """The logits, and the gradients of the scheme's and of the decoder's parameters, each as one vector."""
    model = model.to(device).train()
    logits = model(batch(device)["input_ids"], use_cache=False).logits
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits)
    (logits * upstream / logits.shape[-1]).sum().backward()
    groups: dict[str, list[torch.Tensor]] = {"query": [], "norm_weight": [], "gate": [], "decoder": []}
    for key, parameter in model.named_parameters():
        last = key.rsplit(".", 1)[-1]
        group = last if "residual." in key and last in groups else "norm_weight" if "residual." in key else "decoder"
        groups[group].append(parameter.grad.double().flatten())
    grads = {key: torch.cat(each) for key, each in groups.items() if each}
    return {"logits": logits.detach().double().flatten(), **grads}


def drawn(options, dtype, device, backend, exact=False, **shape):
    """`parts` of a few models that differ in their weights, one after another.

    The errors of one model are a noisy measure: of two forms that round equally well, one or the other has twice the
    error in the gradients of the queries, and five times in those of the few gates.
    """
    found = []
    for seed in range(8):
        model = move_off_init(routed({**options, "backend": backend}, **shape), seed, std=0.02).to(dtype)
        found.append(parts(in_fp64(model) if exact else model, device))
    return {key: torch.cat([each[key] for each in found]) for key in found[0]}


def check_errors(options, dtype, device, **shape):
    arguments = (options, dtype, device)
    ours, reference = (drawn(*arguments, backend, **shape) for backend in ("auto", "reference"))
    for key, wanted in drawn(*arguments, "reference", exact=True, **shape).items():
        error, beside = ((each[key] - wanted).norm() / wanted.norm() for each in (ours, reference))
        assert error <= max(1.5 * beside, 1e-5 if dtype == torch.float32 else 0), (key, float(error), float(beside))


@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_errors_of_the_plain_bodies_are_those_of_the_reference_in_the_same_dtype(options):
    check_errors(options, torch.bfloat16, "cpu", num_hidden_layers=12)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", SCHEMES, ids=name)
def test_errors_of_the_kernels_are_those_of_the_reference_in_the_same_dtype(options, dtype):
    check_errors(options, dtype, "cuda", num_hidden_layers=12, hidden_size=256, num_attention_heads=4, head_dim=64)

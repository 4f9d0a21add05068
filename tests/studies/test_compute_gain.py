import warnings

import numpy as np
import pytest

from depthroute.models.presets import decoder_config
from depthroute.studies.compute_gain import compute_gain, fit_power_law
from depthroute.studies.flops import token_flops

# arXiv 2607.27230, second version: 20,000 steps of (batch, sequence length), loss of the baseline, MHAR minus baseline.
PAPER = {
    "100m": ((64, 2048), 3.336, -0.049, 1.27),
    "350m": ((32, 1024), 3.290, -0.080, 1.49),
    "1b": ((32, 1024), 3.175, -0.063, 1.38),
}
STEPS = 20_000


def _paper_gains(*, output_head=True, attention=True, causal=False, irreducible=0.0):
    flops, shares = [], []
    for preset, ((batch, length), *_) in PAPER.items():
        token = token_flops(decoder_config(preset), {"scheme": "mhar"}, sequence_length=length, causal=causal)
        counted = token.weights - (0 if output_head else token.output_head) + (token.attention if attention else 0)
        flops.append(counted * STEPS * batch * length)
        shares.append(token.routing / counted)
    losses = [row[1] for row in PAPER.values()]
    fit = fit_power_law(flops, losses, irreducible=irreducible)
    return fit, [
        compute_gain(fit, baseline_loss=loss, method_loss=loss + difference, routing_share=share)
        for (_, loss, difference, _), share in zip(PAPER.values(), shares, strict=True)
    ]


def test_the_gains_of_the_paper_are_reproduced_with_head_full_attention_and_no_irreducible_loss():
    fit, gains = _paper_gains()
    assert fit.exponent == pytest.approx(0.0599, abs=5e-5)
    # The third decimal of a gain is below what three-decimal losses decide, so 1.495 stands for the paper's 1.49.
    assert gains == pytest.approx([row[3] for row in PAPER.values()], abs=0.006)
    assert gains == pytest.approx([1.274, 1.495, 1.381], abs=1e-3)


@pytest.mark.parametrize(
    ("convention", "gains"),
    [
        ({"output_head": False}, [1.476, 1.923, 1.695]),
        ({"attention": False}, [1.296, 1.540, 1.414]),
        ({"causal": True}, [1.283, 1.514, 1.395]),
    ],
)
def test_other_ways_to_count_do_not_reproduce_them(convention, gains):
    assert _paper_gains(**convention)[1] == pytest.approx(gains, abs=1e-3)


def test_a_fitted_irreducible_loss_lies_above_what_the_method_reaches():
    with (
        pytest.warns(UserWarning, match="3 parameters fitted through 3 points"),
        pytest.raises(ValueError, match=r"got 3\.1120, but the fit never falls below E = 3\.1"),
    ):
        _paper_gains(irreducible=None)


def test_the_routing_share_of_the_paper_is_half_to_one_and_a_fifth_percent():
    shares = [
        token_flops(decoder_config(preset), {"scheme": "mhar"}, sequence_length=length).routing_share
        for preset, ((_, length), *_) in PAPER.items()
    ]
    assert [round(100 * share, 2) for share in shares] == [0.47, 0.86, 1.18]


@pytest.mark.parametrize("irreducible", [0.0, 1.7])
def test_a_known_power_law_is_found_again(irreducible):
    C = np.geomspace(1e17, 1e20, 5)
    fit = fit_power_law(C, 30 * C**-0.07 + irreducible, irreducible=irreducible)
    assert fit.exponent == pytest.approx(0.07)
    assert fit.error < 1e-12
    assert fit.loss(3e18) == pytest.approx(30 * 3e18**-0.07 + irreducible)
    assert fit.flops_needed(fit.loss(3e18)) == pytest.approx(3e18)


def test_the_irreducible_loss_of_a_known_law_is_found_again():
    C = np.geomspace(1e17, 1e21, 6)
    fit = fit_power_law(C, 400 * C**-0.15 + 1.7, irreducible=None)
    assert (fit.exponent, fit.irreducible) == (pytest.approx(0.15, rel=1e-3), pytest.approx(1.7, rel=1e-3))


def test_gain_of_a_known_law():
    # With L = C^-1/2 a loss that is halved needs four times the compute; 25 % of routing is carried by the method.
    fit = fit_power_law([1.0, 4.0, 16.0], [1.0, 0.5, 0.25])
    assert compute_gain(fit, baseline_loss=0.5, method_loss=0.25) == pytest.approx(4.0)
    assert compute_gain(fit, baseline_loss=0.5, method_loss=0.25, routing_share=0.25) == pytest.approx(3.2)
    assert compute_gain(fit, baseline_loss=0.5, method_loss=0.5) == pytest.approx(1.0)


def test_the_fit_is_printed_and_three_points_are_called_weak():
    text = str(fit_power_law([1.0, 4.0, 16.0], [1.0, 0.5, 0.25]))
    assert text == (
        "L = 10^0.0000 * C^-0.5000 + 0.0000 (3 points, relative error 0.00%; only 3 points, so the exponent is weak)"
    )
    assert "weak" not in str(fit_power_law([1.0, 4.0, 16.0, 64.0], [1.0, 0.5, 0.25, 0.125]))


def test_two_points_warn_and_three_do_not():
    with pytest.warns(UserWarning, match="2 parameters fitted through 2 points"):
        fit_power_law([1.0, 4.0], [1.0, 0.5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit_power_law([1.0, 4.0, 16.0], [1.0, 0.5, 0.25])


@pytest.mark.parametrize(
    ("flops", "losses", "options", "message"),
    [
        ([1.0], [1.0], {}, "a fit wants at least two"),
        ([1.0, 1.0], [1.0, 0.9], {}, "a fit wants at least two"),
        ([1.0, 2.0], [1.0], {}, "got 2 and 1, want as many"),
        ([1.0, -2.0], [1.0, 0.9], {}, "must be finite and positive"),
        ([1.0, 2.0], [1.0, float("nan")], {}, "must be finite and positive"),
        ([1.0, 2.0, 3.0], [1.0, 1.1, 1.2], {}, "do not fall as the FLOPs rise"),
        ([1.0, 2.0, 3.0], [1.0, 0.9, 0.8], {"irreducible": 0.8}, "wants 0 <= E < the lowest loss 0.8000"),
    ],
)
def test_points_that_allow_no_fit_are_refused(flops, losses, options, message):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=message):
            fit_power_law(flops, losses, **options)


def test_a_negative_routing_share_is_refused():
    fit = fit_power_law([1.0, 4.0, 16.0], [1.0, 0.5, 0.25])
    with pytest.raises(ValueError, match=r"routing_share: got -0\.1"):
        compute_gain(fit, baseline_loss=0.5, method_loss=0.25, routing_share=-0.1)

"""Numbers derived by hand: the handbook's golden vectors (policy, sections 1H, 2A and 2B)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trueup.evidence import TokenTrace
from trueup.gap import GapReport
from trueup.policy import RolloutCorrection, mismatch


def measure(*pairs: tuple[list[float], list[float]], **options: str) -> GapReport:
    """The report of sequences given as (rollout, train) probabilities or log-probabilities."""
    rollout = [[math.log(p) if p > 0 else p for p in pair[0]] for pair in pairs]
    train = [[math.log(p) if p > 0 else p for p in pair[1]] for pair in pairs]
    trace = TokenTrace.from_lists([[1] * len(row) for row in rollout], rollout, train)
    return mismatch(trace, correction=RolloutCorrection.parse(**options))


# ℓ = (ln 2, −ln 2).
A = ([0.4, 0.4], [0.8, 0.2])
B = ([0.5, 0.2, 0.8, 0.1], [0.4, 0.25, 0.8, 0.05])


def test_sequence_a() -> None:
    report = measure(A, rs="token_k1,token_k2,token_k3", rs_threshold="0.9_1.2,0.235,0.2")
    expected = {
        "mean_ratio": 1.25,
        "mean_k1": 0.0,
        "mean_k2": 0.240227,
        "mean_k3": (0.306853 + 0.193147) / 2,
        # Mean of ρ² − 1: (4 + .25)/2 − 1.
        "rollout_corr/chi2_token": 1.125,
        "rollout_corr/chi2_seq": 0.0,
        "rollout_corr/rollout_is_max": 2.0,
        "rollout_corr/rollout_is_min": 0.5,
        "rollout_corr/rollout_rs_token_k1_max": 0.693147,
        "rollout_corr/rollout_rs_token_k1_min": -0.693147,
        "rollout_corr/rollout_rs_token_k2_mean": 0.240227,
        "rollout_corr/rollout_rs_token_k3_max": 0.306853,
        "rollout_corr/rollout_rs_token_k3_min": 0.193147,
        "rollout_corr/rollout_rs_token_k3_masked_fraction": 0.5,
        "rollout_corr/rollout_rs_token_k2_masked_fraction": 1.0,
        "nemo_rl/token_mult_prob_error": 2.0,
        "ess_fraction": 0.735294,
    }
    assert {name: report[name].value for name in expected} == pytest.approx(expected, abs=2e-6)


def test_sequence_b() -> None:
    report = measure(B)
    expected = {
        "mean_k1": 0.173287,
        "mean_k3": 0.060787,
        "nemo_rl/gen_kl_error": 0.060787,
        "nemo_rl/policy_kl_error": 0.089213,
        "nemo_rl/token_mult_prob_error": 1.375,
        "mean_abs_log_ratio": 0.284859,
        "training/rollout_probs_diff_mean": 0.05,
        "training/rollout_probs_diff_max": 0.1,
        "rollout_corr/chi2_token": -0.136875,
        "rollout_corr/chi2_seq": -0.75,
        "ess_fraction": 0.912563,
        "rollout_corr/training_ppl": 3.976354,
        "rollout_corr/rollout_ppl": 3.343702,
        "rollout_corr/log_ppl_diff": 0.173287,
        "rollout_corr/ppl_ratio": 1.189207,
        "training/rollout_actor_probs_pearson_corr": 0.979262,
        # The geometric ratio is .840896, ms-swift squares it; the product is .5.
        "rollout_correction/chi2_seq": 0.840896**2 - 1.0,
        "sampling/importance_sampling_ratio/mean": 0.5,
        "openrlhf/vllm_kl": 0.173287,
        "areal/behave_approx_kl": -0.173287,
    }
    assert {name: report[name].value for name in expected} == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(
    ("threshold", "mean", "outside"), [("0.4999_5.0", 1.25, 0.0), ("0.6_5.0", 1.0, 0.5), ("1.5", 1.0, None)]
)
def test_icepop_zeroes_and_tis_truncates(threshold: str, mean: float, outside: float | None) -> None:
    report = measure(A, is_threshold=threshold)
    # [.5, 5] keeps (2, .5) (a hair wider here: float32 inputs); [.6, 5] gives (2, 0); truncation gives (1.5, .5).
    assert report["rollout_corr/rollout_is_mean"].value == pytest.approx(mean, abs=1e-6)
    if outside is None:
        assert "rollout_corr/rollout_is_oob_ratio" not in report
    else:
        assert report["rollout_corr/rollout_is_oob_ratio"].value == outside


def test_k1_bounds_are_on_rollout_over_train() -> None:
    # "0.9_1.2" keeps ρ in [1/1.2, 1/.9] = [.8333, 1.1111]: ρ = 1.15 goes, though 1.15 < 1.2, and .85 stays.
    ratios = [1.15, 0.85, 1.10, 0.82]
    report = measure(([0.5] * 4, [0.5 * ratio for ratio in ratios]), rs="token_k1", rs_threshold="0.9_1.2")
    assert report["rollout_corr/rollout_rs_token_k1_masked_fraction"].value == 0.5
    # k1 is −ℓ: too high where ρ is too low.
    assert report["rollout_corr/rollout_rs_token_k1_fraction_high"].value == 0.25
    assert report["rollout_corr/rollout_rs_token_k1_fraction_low"].value == 0.25


def test_geometric_window_ignores_length_and_the_product_does_not() -> None:
    # Mean ℓ = .0009 over 1000 tokens: the geometric ratio is 1.0009004, the product 2.4596.
    rollout = [-1.0] * 1000
    train = [-1.0 + 0.0009] * 1000
    trace = TokenTrace.from_lists([[1] * 1000], [rollout], [train])
    geometric = mismatch(trace, correction=RolloutCorrection.parse(rs="seq_mean_k1"))
    assert geometric["rollout_corr/rollout_rs_masked_fraction"].value == 0.0
    product = mismatch(trace, correction=RolloutCorrection.parse(is_level="sequence", is_threshold="100"))
    assert product["rollout_corr/rollout_is_mean"].value == pytest.approx(2.4596, abs=2e-4)


def test_impossible_token_explodes_only_where_the_framework_lets_it() -> None:
    # μ = e^−5, π = e^−15: the handbook's example for NeMo-RL's three divergences.
    report = measure(([-5.0], [-15.0]))
    assert report["nemo_rl/gen_kl_error"].value == pytest.approx(9.00005, abs=1e-5)
    assert report["nemo_rl/policy_kl_error"].value == pytest.approx(22015.47, abs=0.01)
    assert report["nemo_rl/js_divergence_error"].value == pytest.approx(4.3069, abs=1e-4)


def test_beyond_the_safety_bound() -> None:
    # ℓ = 50: clamped ratios are e^20, verl's k3_kl is not clamped, ms-swift caps a token's k3 at 10.
    report = measure(([-51.0], [-1.0]))
    assert report["mean_ratio"].value == pytest.approx(math.exp(20.0))
    assert report["rollout_corr/k3_kl"].value == pytest.approx(math.exp(50.0) - 51.0)
    assert report["rollout_correction/k3_kl"].value == pytest.approx(10.0)
    assert report["nemo_rl/policy_kl_error"].value == pytest.approx(math.exp(-50.0) - 1.0 + 50.0)
    assert report["nemo_rl/js_divergence_error"].value == pytest.approx(25.0 - math.log(2.0))
    assert report["mean_abs_prob_diff"].value == pytest.approx(math.exp(-1.0) - math.exp(-51.0))
    assert report["rollout_corr/chi2_seq"].value == pytest.approx(math.exp(40.0))
    assert report["mismatch_kl/all/max"].value == pytest.approx(math.exp(50.0) - 51.0)
    assert report["max_abs_log_ratio"].value == 50.0


def test_slime_averages_over_samples_first() -> None:
    # |ℓ| = .1 on one token and .3 on three: by token .25, by sample .2.
    report = measure(([-1.0], [-1.1]), ([-1.0] * 3, [-1.3] * 3))
    assert report["mean_abs_log_ratio"].value == pytest.approx(0.25, abs=1e-6)
    assert report["slime/train_rollout_logprob_abs_diff"].value == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("sigma", [0.01, 0.05, 0.1, 0.3])
def test_gaussian_calculator(sigma: float) -> None:
    # ℓ ~ N(−σ²/2, σ²): k1 = k3 = σ²/2, chi2 = e^(σ²) − 1, mean ρ = 1 (handbook 2C). Quantiles of the normal
    # stand in for draws, so that the check needs no tolerance for sampling.
    n = 20_000
    from scipy.stats import norm

    ell = -0.5 * sigma**2 + sigma * norm.ppf((np.arange(n) + 0.5) / n)
    rollout = np.full(n, -3.0)
    trace = TokenTrace.from_lists([[1] * n], [rollout.tolist()], [(rollout + ell).tolist()])
    report = mismatch(trace)
    assert report["mean_ratio"].value == pytest.approx(1.0, abs=2e-4 * sigma + 1e-6)
    assert report["mean_k1"].value == pytest.approx(sigma**2 / 2, rel=1e-3, abs=1e-7)
    assert report["mean_k3"].value == pytest.approx(sigma**2 / 2, rel=2e-3)
    assert report["chi2_token"].value == pytest.approx(math.expm1(sigma**2), rel=5e-3, abs=1e-6)
    folded = sigma * math.sqrt(2 / math.pi) * math.exp(-(sigma**2) / 8) + sigma**2 / 2 * (
        1 - 2 * norm.cdf(-sigma / 2)
    )
    assert report["mean_abs_log_ratio"].value == pytest.approx(folded, rel=1e-3)
    assert report["log_ratio_kurtosis"].value == pytest.approx(3.0, abs=0.01)

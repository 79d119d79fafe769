"""The kernel against an independent, padded implementation in PyTorch, float64, on random ragged traces."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from padded_torch import off_policy_metrics, rejection_metrics, weight_metrics
from policy.synthetic import random_trace

from trueup.evidence import TokenTrace
from trueup.policy import RolloutCorrection, mismatch

OPTIONS = {
    "token_k1": (0.9, 1.3), "token_k2": (None, 0.05), "token_k3": (None, 0.04),
    "seq_sum_k1": (0.5, 2.0), "seq_sum_k2": (None, 0.6), "seq_sum_k3": (None, 0.5),
    "seq_mean_k1": (0.95, 1.05), "seq_mean_k2": (None, 0.04), "seq_mean_k3": (None, 0.04),
    "seq_max_k2": (None, 0.2), "seq_max_k3": (None, 0.2),
}  # fmt: skip


def padded(trace: TokenTrace, values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    out = torch.zeros((len(trace), int(trace.lengths.max())), dtype=dtype)
    for row, (start, stop) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        out[row, : stop - start] = torch.from_numpy(values[start:stop].astype(np.float64)).to(dtype)
    return out


@pytest.mark.parametrize("noise", [0.02, 0.3, 8.0])
@pytest.mark.parametrize(
    ("level", "threshold"), [("token", "2.0"), ("token", "0.5_5.0"), ("sequence", "2.0"), ("sequence", "0.5_3.0")]
)
def test_every_verl_metric(noise: float, level: str, threshold: str) -> None:
    trace = random_trace(np.random.default_rng(7), noise=noise)
    spelled = ["_".join(str(x) for x in bounds if x is not None) for bounds in OPTIONS.values()]
    correction = RolloutCorrection.parse(
        is_level=level, is_threshold=threshold, rs=",".join(OPTIONS), rs_threshold=",".join(spelled)
    )
    report = mismatch(trace, correction=correction, replicates=10)

    train = padded(trace, trace.train_logprobs, torch.float64)
    rollout = padded(trace, trace.rollout_logprobs, torch.float64)
    mask = padded(trace, trace.mask, torch.int64)
    bounds = [float(part) for part in threshold.split("_")]
    lower = bounds[0] if len(bounds) == 2 else None
    expected = (
        off_policy_metrics(train, rollout, mask)
        | weight_metrics(train - rollout, mask, level=level, upper=bounds[-1], lower=lower)
        | rejection_metrics(train - rollout, mask, options=OPTIONS)
    )
    measured = {name: report[f"rollout_corr/{name}"].value for name in expected}
    assert measured == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert len(expected) > 13 + 14 + 11 * 15


def test_the_other_frameworks() -> None:
    trace = random_trace(np.random.default_rng(3), noise=0.4)
    report = mismatch(trace, replicates=10)
    train = padded(trace, trace.train_logprobs, torch.float64)
    rollout = padded(trace, trace.rollout_logprobs, torch.float64)
    mask = padded(trace, trace.mask, torch.bool)
    ell = train - rollout
    flat, p, q = ell[mask], torch.exp(train[mask]), torch.exp(rollout[mask])
    n = mask.sum(1)
    valid = n > 0
    sample_mean = lambda x: (torch.where(mask, x, 0.0).sum(1)[valid] / n[valid]).mean().item()  # noqa: E731
    product = torch.exp(torch.where(mask, ell, 0.0).sum(1))
    kept = torch.where(product > 3.0, 0.0, product)
    mixture = torch.log(0.5 * p + 0.5 * q)
    divergence = lambda u: torch.exp(u) - u - 1  # noqa: E731
    clipped = torch.exp(flat).clamp(0.5, 2.0)
    place = torch.arange(mask.shape[1], dtype=torch.float64).expand(mask.shape)[mask]
    expected = {
        "sampling/sampling_logp_difference/mean": flat.abs().mean(),
        "sampling/sampling_logp_difference/max": flat.abs().max(),
        "sampling/importance_sampling_ratio/mean": kept.mean(),
        "sampling/importance_sampling_ratio/min": kept.min(),
        "sampling/importance_sampling_ratio/max": kept.max(),
        "nemo_rl/token_mult_prob_error": torch.exp(flat.abs()).mean(),
        "nemo_rl/js_divergence_error": 0.5
        * (divergence(torch.log(p) - mixture) + divergence(torch.log(q) - mixture)).mean(),
        "nemo_rl/policy_kl_error": (torch.exp(-flat) - 1 + flat).mean(),
        "nemo_rl/approx_entropy": -(torch.exp(flat) * train[mask]).mean(),
        "nemo_rl/sampling_importance_ratio": torch.exp(flat).mean(),
        "slime/tis": sample_mean(torch.exp(ell)),
        "slime/tis_abs": sample_mean((torch.exp(ell) - 1).abs()),
        "slime/tis_clipfrac": sample_mean((torch.exp(ell) > 2.0).double()),
        "policy/rollout_train_logprobs_abs_diff_std": flat.abs().std(),
        "policy/rollout_train_logprobs_abs_diff_min": flat.abs().min(),
        "actor/train_infer_diff_token_mean": (p - q).mean(),
        "training/rollout_probs_diff_std": (p - q).abs().std(),
        "training/rollout_actor_probs_pearson_corr": torch.corrcoef(torch.stack([p, q]))[0, 1],
        "areal/rollout_train_extreme_frac_tau2": (flat.abs() > math.log(2)).double().mean(),
        "rollout_correction/ess": clipped.mean() ** 2 / (clipped**2).mean(),
        "mismatch_kl/all/max": divergence(flat).max(),
        "log_ratio_std": flat.std(correction=0),
        "position_slope": 1000
        * torch.cov(torch.stack([place, flat.abs()]), correction=0)[0, 1]
        / place.var(correction=0),
        "log_ratio_slope": torch.cov(torch.stack([rollout[mask], flat]), correction=0)[0, 1]
        / rollout[mask].var(correction=0),
        "log_ratio_kurtosis": ((flat - flat.mean()) ** 4).mean() / flat.var(correction=0) ** 2,
    }
    expected = {name: float(value) for name, value in expected.items()}
    assert {name: report[name].value for name in expected} == pytest.approx(expected, rel=1e-6)


def test_every_seq_mult_prob_error() -> None:
    trace = TokenTrace.from_lists(
        [[1, 2], [3], [4]], [[-1.0, -1.0], [-2.0], [-1.0]], [[-1.0, -1.5], [-2.0], [-1.0]],
        mask=[[True, True], [True], [False]],
    )  # fmt: skip
    report = mismatch(trace)
    # Sequences with a token: (1 + e^.5)/2 and 1; the masked one must not enter as 0.
    first = (1 + math.exp(0.5)) / 2
    assert report["nemo_rl/max_seq_mult_prob_error"].value == pytest.approx(first, rel=1e-6)
    assert report["nemo_rl/min_seq_mult_prob_error"].value == 1.0
    assert report["nemo_rl/mean_seq_mult_prob_error"].value == pytest.approx((first + 1) / 2, rel=1e-6)

"""The same metrics the ordinary way: padded PyTorch tensors, one full-size temporary an operation.

This is how trainers compute them; verl's rollout-correction helper is the pattern, down to the int64 mask that is
converted in every masked mean. It serves twice: as the baseline of the benchmark and, in float64, as the
independent implementation that the tests hold the kernel against.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUND = 20.0


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return (torch.where(mask.bool(), values, 0.0) * mask).sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    return masked_sum(values, mask, dim) / (mask.sum(dim) + 1e-8)


def off_policy_metrics(train: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    ell = train - rollout
    log_train, log_rollout = masked_mean(train, mask, 1), masked_mean(rollout, mask, 1)
    diff = log_rollout - log_train
    total = masked_sum(ell, mask, 1).clamp(-BOUND, BOUND)
    return {
        "training_ppl": torch.exp(-log_train).mean().item(),
        "training_log_ppl": (-log_train).mean().item(),
        "kl": masked_mean(-ell, mask).item(),
        "k3_kl": masked_mean(torch.exp(ell) - ell - 1, mask).item(),
        "rollout_ppl": torch.exp(-log_rollout).mean().item(),
        "rollout_log_ppl": (-log_rollout).mean().item(),
        "log_ppl_diff": diff.mean().item(),
        "log_ppl_abs_diff": diff.abs().mean().item(),
        "log_ppl_diff_max": diff.max().item(),
        "log_ppl_diff_min": diff.min().item(),
        "ppl_ratio": torch.exp(diff).mean().item(),
        "chi2_token": masked_mean(torch.exp(ell.clamp(-BOUND, BOUND)).square(), mask).item() - 1,
        "chi2_seq": torch.exp(2 * total).mean().item() - 1,
    }


def weight_metrics(
    ell: Tensor, mask: Tensor, *, level: str = "token", upper: float = 2.0, lower: float | None = None
) -> dict[str, float]:
    if level == "token":
        log_ratio = ell
        raw = torch.exp(ell.clamp(-BOUND, BOUND)) * mask
    else:
        log_ratio = masked_sum(ell, mask, 1).unsqueeze(1)
        raw = torch.exp(log_ratio.clamp(-BOUND, BOUND)).expand_as(ell) * mask
    outside = (raw < lower) | (raw > upper) if lower is not None else None
    applied = raw.clamp(max=upper) if outside is None else torch.where(outside, 0.0, raw)
    low = 1 / upper if lower is None else lower
    metrics = {"rollout_is_mean": masked_mean(applied, mask).item()}
    if level == "token":
        metrics |= {
            "rollout_is_ratio_fraction_high": masked_mean((raw > upper).to(ell), mask).item(),
            "rollout_is_ratio_fraction_low": masked_mean((raw < low).to(ell), mask).item(),
            "rollout_is_max": applied.masked_fill(~mask.bool(), -math.inf).max().item(),
            "rollout_is_min": applied.masked_fill(~mask.bool(), math.inf).min().item(),
        }
    else:
        metrics |= {
            "rollout_is_ratio_fraction_high": (log_ratio > math.log(upper)).to(ell).mean().item(),
            "rollout_is_ratio_fraction_low": (log_ratio < math.log(low)).to(ell).mean().item(),
            "rollout_is_max": torch.exp(log_ratio.max().clamp(max=BOUND)).item(),
            "rollout_is_min": torch.exp(log_ratio.min()).item(),
        }
    mean = masked_mean(applied, mask)
    spread = masked_mean(applied.square(), mask) - mean.square()
    sequence, raw_sequence = masked_mean(applied, mask, 1), masked_mean(raw, mask, 1)
    metrics |= {
        "rollout_is_std": spread.clamp(min=0).sqrt().item(),
        "rollout_is_eff_sample_size": 1 / masked_mean((applied / mean).square(), mask).item(),
        "rollout_is_seq_mean": sequence.mean().item(),
        "rollout_is_seq_std": sequence.std().item(),
        "rollout_is_seq_max": sequence.max().item(),
        "rollout_is_seq_min": sequence.min().item(),
        "rollout_is_seq_max_deviation": (sequence - 1).abs().max().item(),
        "rollout_is_seq_fraction_high": (raw_sequence > upper).to(ell).mean().item(),
        "rollout_is_seq_fraction_low": (raw_sequence < low).to(ell).mean().item(),
    }
    if outside is not None:
        metrics["rollout_is_oob_ratio"] = masked_mean(outside.to(ell), mask).item()
    return metrics


def rejection_metrics(
    ell: Tensor, mask: Tensor, *, options: dict[str, tuple[float | None, float]]
) -> dict[str, float]:
    """``options`` maps verl's option name to its (lower, upper) threshold; k1 thresholds are ratios."""
    safe = ell.clamp(-BOUND, BOUND)
    token = {"k1": -safe, "k2": 0.5 * safe.square(), "k3": torch.exp(safe) - 1 - safe}
    valid = mask.any(1)
    keep_all = torch.ones_like(mask, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for option, (lower, upper) in options.items():
        kind = option[-2:]
        low, high = (math.log(lower), math.log(upper)) if kind == "k1" and lower else (None, upper)
        values = token[kind]
        per_sequence = {
            "token": lambda v: masked_mean(v, mask, 1),
            "seq_sum": lambda v: masked_sum(v, mask, 1),
            "seq_mean": lambda v: masked_mean(v, mask, 1),
            "seq_max": lambda v: v.masked_fill(~mask.bool(), -math.inf).max(1).values.clamp(min=0),
        }[option[:-3]](values)
        if not option.startswith("token"):
            values = per_sequence.unsqueeze(1).expand_as(ell)
        keep = values <= high
        if low is not None:
            keep = keep & (values >= low)
        keep_all = keep_all & keep
        sequence = per_sequence[valid]
        name = f"rollout_rs_{option}"
        over_tokens = option.startswith("token")
        above, below = values > high, values < (low if low is not None else -math.inf)
        clipped = values.clamp(min=low if low is not None else 0.0, max=high)
        spread = masked_mean(clipped.square(), mask) - masked_mean(clipped, mask).square()
        sequence_above = (sequence > high).to(ell).mean().item()
        sequence_below = (sequence < low).to(ell).mean().item() if low is not None else 0.0
        rejected = (~keep & mask.bool()).any(1)
        metrics |= {
            f"{name}_mean": masked_mean(values, mask).item(),
            f"{name}_max": (values.masked_fill(~mask.bool(), -math.inf) if over_tokens else sequence).max().item(),
            f"{name}_min": (values.masked_fill(~mask.bool(), math.inf) if over_tokens else sequence).min().item(),
            f"{name}_fraction_high": masked_mean(above.to(ell), mask).item() if over_tokens else sequence_above,
            f"{name}_fraction_low": masked_mean(below.to(ell), mask).item() if over_tokens else sequence_below,
            f"{name}_std": spread.clamp(min=0).sqrt().item(),
            f"{name}_seq_mean": sequence.mean().item(),
            f"{name}_seq_std": sequence.std().item(),
            f"{name}_seq_max": sequence.max().item(),
            f"{name}_seq_min": sequence.min().item(),
            f"{name}_seq_max_deviation": sequence.abs().max().item(),
            f"{name}_seq_fraction_high": sequence_above,
            f"{name}_seq_fraction_low": sequence_below,
            f"{name}_masked_fraction": masked_mean((~keep).to(ell), mask).item(),
            f"{name}_seq_masked_fraction": rejected[valid].to(ell).mean().item(),
        }
    metrics["rollout_rs_masked_fraction"] = masked_mean((~keep_all).to(ell), mask).item()
    metrics["rollout_rs_seq_masked_fraction"] = (~keep_all & mask.bool()).any(1).to(ell).mean().item()
    return metrics

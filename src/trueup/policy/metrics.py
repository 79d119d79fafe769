"""The mismatch metrics as formulas on sums, and trueup's own list of them.

A formula sees ``s``, a mapping from the column names of ``trueup.policy.sums`` to totals. It is evaluated once on
the totals of the trace and once on every bootstrap resample of them, so that each number and its interval come
from the same line. Source of the definitions: handbook, policy section 2C.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trueup.gap import Worse

Array = npt.NDArray[np.float64]
Totals = Mapping[str, Array]
Formula = Callable[[Totals], Array]


@dataclass(frozen=True, slots=True)
class Metric:
    """A quantity computed from totals, with the two sides' own values where it has sides.

    ``count`` is the column that ``n`` is read from; ``needs`` names an optional column of the trace.
    """

    name: str
    formula: Formula
    label: str = ""
    unit: str = ""
    worse: Worse = "nonzero"
    source: str = "trueup"
    count: str = "n"
    train: Formula | None = None
    infer: Formula | None = None
    note: str = ""
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class ExtremeMetric:
    """A maximum or minimum over the trace: exact, and without an interval (it grows with the sample)."""

    name: str
    extreme: str
    largest: bool
    label: str = ""
    unit: str = ""
    source: str = "trueup"
    count: str = "n"
    note: str = ""
    needs: str | None = None


def mean(column: str, count: str = "n") -> Formula:
    """The mean of a column over its unit: tokens ("n"), sequences that have any ("seqs"), or all ("batch")."""
    return lambda s: s[column] / s[count]


def k1(s: Totals) -> Array:
    """k1 estimate of KL(rollout ‖ train): mean of log μ − log π."""
    return -s["ell"] / s["n"]


def k3(s: Totals) -> Array:
    """k3 estimate of KL(rollout ‖ train): mean of e^ℓ − 1 − ℓ, not clamped."""
    return (s["k3"] + s["k3_over"]) / s["n"]


def chi2_token(s: Totals) -> Array:
    """Mean of ρ² minus one, ℓ clamped to ±20."""
    return s["rho_sq"] / s["n"] - 1.0


def ess_fraction(s: Totals) -> Array:
    """Effective sample size over sample size of the untruncated token ratios: (Σρ)² / (n Σρ²)."""
    return s["rho"] ** 2 / (s["n"] * s["rho_sq"])


def deviation(total: Array, squares: Array, n: Array, *, ddof: int = 0) -> Array:
    """Standard deviation from a sum, a sum of squares and a count; 0 for a single value, as frameworks log it."""
    variance = np.maximum(squares - total**2 / n, 0.0) / np.maximum(n - ddof, 1.0)
    return np.asarray(np.sqrt(variance))


def pearson(s: Totals) -> Array:
    """Correlation of the two sides' probabilities over tokens; NaN where one side does not vary."""
    n = s["n"]
    covariance = s["p_cross"] - s["p_train"] * s["p_rollout"] / n
    train = np.maximum(s["p_train_sq"] - s["p_train"] ** 2 / n, 0.0)
    rollout = np.maximum(s["p_rollout_sq"] - s["p_rollout"] ** 2 / n, 0.0)
    return np.asarray(covariance / np.sqrt(train * rollout))


def kurtosis(s: Totals) -> Array:
    """Kurtosis of ℓ (3 for a Gaussian)."""
    n = s["n"]
    m = s["ell"] / n
    second = s["ell_sq"] / n - m**2
    fourth = s["ell_fourth"] / n - 4 * m * s["ell_cube"] / n + 6 * m**2 * s["ell_sq"] / n - 3 * m**4
    return fourth / second**2


def slope(s: Totals) -> Array:
    """Slope of ℓ on log μ, pooled over contexts."""
    n = s["n"]
    covariance = s["ell_rollout"] - s["ell"] * s["rollout"] / n
    return covariance / (s["rollout_sq"] - s["rollout"] ** 2 / n)


def position_slope(s: Totals) -> Array:
    """Slope of |ℓ| on the position in the response, per thousand tokens."""
    n = s["n"]
    covariance = s["ell_abs_position"] - s["ell_abs"] * s["position"] / n
    return 1000.0 * covariance / (s["position_sq"] - s["position"] ** 2 / n)


TRUEUP: tuple[Metric | ExtremeMetric, ...] = (
    Metric("mean_abs_log_ratio", mean("ell_abs"), "mean |ℓ|, ℓ = log π_train − log μ_rollout", "nats", "higher"),
    ExtremeMetric("max_abs_log_ratio", "ell_abs", True, "largest |ℓ|", "nats"),
    Metric(
        "mean_k1", k1, "k1 estimate of KL(rollout‖train)", "nats", "nonzero",
        train=mean("train"), infer=mean("rollout"),
        note="sides: mean log-probabilities; below 0 beyond noise, the recorded law was not sampled",
    ),
    Metric("mean_k2", lambda s: 0.5 * s["ell_sq"] / s["n"], "k2 estimate: mean ℓ²/2", "nats", "higher"),
    Metric("mean_k3", k3, "k3 estimate of KL(rollout‖train)", "nats", "higher"),
    Metric(
        "mean_ratio", mean("rho"), "mean ratio ρ = π/μ (1 if the recorded law was sampled)", "ratio", "nonzero",
        note="ℓ clamped to ±20",
    ),
    Metric("ess_fraction", ess_fraction, "effective sample size / n of the ratios", "fraction", "lower"),
    Metric(
        "surprisal_gap", lambda s: (s["entropy_surprisal"] - s["entropy"]) / s["entropy_n"],
        "mean surprisal − mean entropy of the trainer", "nats", "nonzero", count="entropy_n",
        train=lambda s: s["entropy"] / s["entropy_n"], infer=lambda s: s["entropy_surprisal"] / s["entropy_n"],
        note="below 0 the sampler was sharper than the trainer's law, above 0 flatter", needs="entropies",
    ),
    Metric(
        "mean_abs_prob_diff", mean("dp_abs"), "mean |π − μ| of the sampled token", "probability", "higher",
        train=mean("p_train"), infer=mean("p_rollout"),
    ),
    ExtremeMetric("max_abs_prob_diff", "dp", True, "largest |π − μ|", "probability"),
    Metric("extreme_fraction", mean("extreme"), "tokens whose ratio leaves [1/2, 2]", "fraction", "higher"),
    Metric("chi2_token", chi2_token, "χ² estimate: mean ρ² − 1", "", "higher", note="below 0 when mean ρ < 1"),
    Metric("js_divergence", mean("js"), "Jensen–Shannon estimate: mean log cosh(ℓ/2)", "nats", "higher"),
    Metric("prob_pearson", pearson, "correlation of π and μ", "", "lower", note="blind to rare bad tokens"),
    Metric("log_ratio_std", lambda s: deviation(s["ell"], s["ell_sq"], s["n"]), "standard deviation of ℓ", "nats",
           "higher"),
    Metric("log_ratio_kurtosis", kurtosis, "kurtosis of ℓ (3 = Gaussian)", "", "higher"),
    Metric("log_ratio_slope", slope, "slope of ℓ on log μ", "nats per nat", "nonzero"),
    Metric("position_slope", position_slope, "slope of |ℓ| on position", "nats per 1000 tokens", "higher",
           note="growth along the response points to positions, caches or a context that drifted"),
    Metric("positive_fraction", mean("positive"), "tokens with ℓ > 0", "fraction", "nonzero",
           note="0 when a truncated support was renormalised"),
    Metric("exact_zero_fraction", mean("zero"), "tokens with ℓ = 0 exactly", "fraction", "nonzero",
           note="1 when the two sides are bit-identical, or one was copied from the other"),
    Metric("first_token_share", lambda s: s["first_abs"] / s["ell_abs"], "share of Σ|ℓ| on first tokens",
           "fraction", "higher"),
    Metric("last_token_share", lambda s: s["last_abs"] / s["ell_abs"], "share of Σ|ℓ| on last tokens", "fraction",
           "higher"),
    Metric("mean_length", lambda s: s["n"] / s["seqs"], "tokens a sequence", "tokens", "higher", count="seqs"),
    Metric(
        "length_times_k3", lambda s: s["n"] / s["seqs"] * k3(s), "mean length × k3: drift of a sequence's weight",
        "nats", "higher", count="seqs", note="above 1, products of ratios over a sequence are mostly noise",
    ),
    Metric(
        "sequence_ess_fraction", lambda s: s["seq_ratio"] ** 2 / (s["batch"] * s["seq_ratio_sq"]),
        "effective sample size / n of sequence products", "fraction", "lower", count="batch",
        note="Σℓ clamped to ±20",
    ),
    ExtremeMetric("max_train_rank", "rank", True, "largest rank of a sampled token", "rank", needs="train_ranks",
                  note="0-based; k − 1 when the sampler kept the top k"),
    Metric("staleness", mean("current_staleness", "current_n"), "mean log π_current − log π_train", "nats",
           count="current_n", needs="current_logprobs"),
    Metric("total_log_ratio", mean("current_total", "current_n"), "mean log π_current − log μ", "nats", "nonzero",
           count="current_n", needs="current_logprobs", note="mismatch plus staleness"),
)  # fmt: skip

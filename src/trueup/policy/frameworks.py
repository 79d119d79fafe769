"""The mismatch metrics that RL frameworks log, under the names they log them by, quirks included.

Names are the framework's own; a bare name is preceded by the framework's. What the quirk is stands in the note.
Source: the frameworks' code, and the handbook, policy sections 2A (verl) and 2B (others).
"""

from __future__ import annotations

import numpy as np

from trueup.policy.metrics import (
    TRUEUP,
    Array,
    ExtremeMetric,
    Formula,
    Metric,
    Totals,
    chi2_token,
    deviation,
    k1,
    k3,
    mean,
    pearson,
)
from trueup.policy.rollout_correction import RolloutCorrection


def verl(correction: RolloutCorrection) -> tuple[Metric | ExtremeMetric, ...]:
    """verl's ``rollout_corr/*`` for the given options, and its older ``training/rollout_*`` group."""

    def metric(name: str, formula: Formula, unit: str = "", count: str = "n", note: str = "") -> Metric:
        return Metric(f"rollout_corr/{name}", formula, unit=unit, source="verl", count=count, note=note)

    def extreme(
        name: str, column: str, largest: bool, unit: str = "", count: str = "n", note: str = ""
    ) -> ExtremeMetric:
        name = f"rollout_corr/{name}"
        return ExtremeMetric(name, column, largest, unit=unit, source="verl", count=count, note=note)

    empty = "a sequence without a token counts as 0"
    off_policy = (
        metric("training_ppl", mean("seq_ppl_train", "batch"), "perplexity", "batch", "mean of sequences' own"),
        metric("training_log_ppl", mean("seq_log_ppl_train", "batch"), "nats", "batch", empty),
        metric("kl", k1, "nats", "n", "k1, weighted by tokens; may be negative"),
        metric("k3_kl", k3, "nats", "n", "not clamped: one impossible token makes it infinite"),
        metric("rollout_ppl", mean("seq_ppl_rollout", "batch"), "perplexity", "batch", "mean of sequences' own"),
        metric("rollout_log_ppl", mean("seq_log_ppl_rollout", "batch"), "nats", "batch", empty),
        metric("log_ppl_diff", mean("seq_diff", "batch"), "nats", "batch", "above 0: the trainer is less sure"),
        metric("log_ppl_abs_diff", mean("seq_diff_abs", "batch"), "nats", "batch"),
        extreme("log_ppl_diff_max", "seq_diff", True, "nats", "batch"),
        extreme("log_ppl_diff_min", "seq_diff", False, "nats", "batch"),
        metric("ppl_ratio", mean("seq_ppl_ratio", "batch"), "ratio", "batch"),
        metric("chi2_token", chi2_token, "", "n", "an estimate: may be negative"),
        metric(
            "chi2_seq", lambda s: s["seq_ratio_sq"] / s["batch"] - 1.0, "", "batch",
            "sequence products clamped to ±20 nats; useless once length × KL passes 1",
        ),
    )  # fmt: skip

    per = "n" if correction.is_level == "token" else "batch"
    weights: tuple[Metric | ExtremeMetric, ...] = (
        metric("rollout_is_mean", mean("is_weight"), "weight", "n", "applied weights, before normalising"),
        metric("rollout_is_ratio_fraction_high", mean("is_high", per), "fraction", per, "raw ratios"),
        metric("rollout_is_ratio_fraction_low", mean("is_low", per), "fraction", per, "raw ratios"),
        extreme("rollout_is_max", "is_weight", True, "weight", per),
        extreme("rollout_is_min", "is_weight", False, "weight", per),
        metric("rollout_is_std", lambda s: deviation(s["is_weight"], s["is_weight_sq"], s["n"]), "weight"),
        metric("rollout_is_eff_sample_size", _weight_ess, "fraction", "n", "a fraction, not a count"),
        metric("rollout_is_seq_mean", mean("is_seq", "batch"), "weight", "batch", empty),
        metric(
            "rollout_is_seq_std", lambda s: deviation(s["is_seq"], s["is_seq_sq"], s["batch"], ddof=1), "weight",
            "batch",
        ),
        extreme("rollout_is_seq_max", "is_seq", True, "weight", "batch"),
        extreme("rollout_is_seq_min", "is_seq", False, "weight", "batch"),
        extreme("rollout_is_seq_max_deviation", "is_seq_deviation", True, "weight", "batch", "from 1"),
        metric("rollout_is_seq_fraction_high", mean("is_seq_high", "batch"), "fraction", "batch", "raw means"),
        metric("rollout_is_seq_fraction_low", mean("is_seq_low", "batch"), "fraction", "batch", "raw means"),
        metric(
            "rollout_is_batch_norm_factor",
            mean("is_weight") if correction.is_level == "token" else mean("is_seq", "seqs"), "weight", per,
            "logged when rollout_is_batch_normalize is on",
        ),
        metric("rollout_is_veto_fraction", mean("seq_catastrophic", "seqs"), "fraction", "seqs", "older releases"),
        metric(
            "rollout_is_catastrophic_token_fraction", mean("catastrophic"), "fraction", "n",
            "older releases: ratio below 1e-4",
        ),
    )  # fmt: skip
    if correction.is_lower is not None:
        weights += (metric("rollout_is_oob_ratio", mean("is_outside"), "fraction", "n", "IcePop only"),)

    rejection: list[Metric | ExtremeMetric] = []
    for rule in correction.rejections:
        option, prefix, seqs = rule.option, f"rollout_rs_{rule.option}", "seqs"
        sequence = rule.level == "sequence"
        high, low = ("seq_high", "seq_low") if sequence else ("high", "low")
        unit, over = ("", seqs) if sequence else ("", "n")
        rejection += [
            metric(f"{prefix}_mean", mean(f"{option}.stat"), unit, "n", "weighted by tokens"),
            extreme(f"{prefix}_max", f"{option}.stat", True, unit, over),
            extreme(f"{prefix}_min", f"{option}.stat", False, unit, over),
            metric(f"{prefix}_fraction_high", mean(f"{option}.{high}", over), "fraction", over),
            metric(f"{prefix}_fraction_low", mean(f"{option}.{low}", over), "fraction", over),
            metric(f"{prefix}_std", _clipped_deviation(option), unit, "n", "clipped to the bounds first"),
            metric(f"{prefix}_seq_mean", mean(f"{option}.seq", seqs), unit, seqs),
            metric(f"{prefix}_seq_std", _sequence_deviation(option), unit, seqs),
            extreme(f"{prefix}_seq_max", f"{option}.seq", True, unit, seqs),
            extreme(f"{prefix}_seq_min", f"{option}.seq", False, unit, seqs),
            extreme(f"{prefix}_seq_max_deviation", f"{option}.seq_deviation", True, unit, seqs, "from 0"),
            metric(f"{prefix}_seq_fraction_high", mean(f"{option}.seq_high", seqs), "fraction", seqs),
            metric(f"{prefix}_seq_fraction_low", mean(f"{option}.seq_low", seqs), "fraction", seqs),
            metric(f"{prefix}_masked_fraction", mean(f"{option}.masked"), "fraction"),
            metric(f"{prefix}_seq_masked_fraction", mean(f"{option}.seq_masked", seqs), "fraction", seqs),
        ]
    if correction.rejections:
        rejection += [
            metric("rollout_rs_masked_fraction", mean("rs_masked"), "fraction"),
            metric("rollout_rs_seq_masked_fraction", mean("rs_seq_masked", "batch"), "fraction", "batch", empty),
        ]

    note = "of probabilities, although verl's docstring says log-probabilities"
    debug = (
        Metric("training/rollout_probs_diff_mean", mean("dp_abs"), unit="probability", source="verl", note=note),
        ExtremeMetric("training/rollout_probs_diff_max", "dp", True, unit="probability", source="verl", note=note),
        Metric(
            "training/rollout_probs_diff_std", lambda s: deviation(s["dp_abs"], s["dp_sq"], s["n"], ddof=1),
            unit="probability", source="verl", note=note,
        ),
        Metric("training/rollout_actor_probs_pearson_corr", pearson, source="verl", note="blind to rare tokens"),
        Metric(
            "training/rollout_probs_diff_valid", lambda s: (s["n"] > 0).astype(np.float64), unit="flag",
            source="verl",
        ),
    )  # fmt: skip
    return off_policy + weights + tuple(rejection) + debug


def _weight_ess(s: Totals) -> Array:
    """1 / M((w / M(w))²) of the applied weights."""
    return s["is_weight"] ** 2 / (s["n"] * s["is_weight_sq"])


def _clipped_deviation(option: str) -> Formula:
    return lambda s: deviation(s[f"{option}.clipped"], s[f"{option}.clipped_sq"], s["n"])


def _sequence_deviation(option: str) -> Formula:
    return lambda s: deviation(s[f"{option}.seq"], s[f"{option}.seq_sq"], s["seqs"], ddof=1)


def _abs_deviation(ddof: int) -> Formula:
    return lambda s: deviation(s["ell_abs"], s["ell_sq"], s["n"], ddof=ddof)


def _swift_ess(s: Totals) -> Array:
    return s["clipped"] ** 2 / (s["n"] * s["clipped_sq"])


def others(correction: RolloutCorrection) -> tuple[Metric | ExtremeMetric, ...]:
    """What the other frameworks log, with their names; a bare name is preceded by its framework's."""
    by_sample = "mean over samples of each sample's mean (the default, without per-token loss)"
    metrics: list[Metric | ExtremeMetric] = [
        Metric("sampling/sampling_logp_difference/mean", mean("ell_abs"), unit="nats", source="TRL",
               note="across processes TRL averages their means"),
        ExtremeMetric("sampling/sampling_logp_difference/max", "ell_abs", True, unit="nats", source="TRL"),
        ExtremeMetric("sampling/importance_sampling_ratio/min", "seq_ratio_kept_3", False, unit="ratio",
                      source="TRL", count="batch", note="sequence_mask at 3.0: 0 when any sequence was masked"),
        Metric("sampling/importance_sampling_ratio/mean", mean("seq_ratio_kept_3", "batch"), unit="ratio",
               source="TRL", count="batch", note="after masking"),
        ExtremeMetric("sampling/importance_sampling_ratio/max", "seq_ratio_kept_3", True, unit="ratio",
                      source="TRL", count="batch", note="after masking: never above 3.0"),
        Metric("nemo_rl/token_mult_prob_error", mean("mult_error"), unit="ratio", source="NeMo-RL",
               note="1 is ideal, 1.01 to 1.02 typical, above 1.05 suspicious"),
        Metric("nemo_rl/gen_kl_error", k3, unit="nats", source="NeMo-RL", note="k3 of KL(gen‖train)"),
        Metric("nemo_rl/policy_kl_error", mean("reverse_k3"), unit="nats", source="NeMo-RL",
               note="samples come from gen, so it is no unbiased KL(train‖gen)"),
        Metric("nemo_rl/js_divergence_error", mean("js"), unit="nats", source="NeMo-RL"),
        Metric("nemo_rl/sampling_importance_ratio", mean("rho"), unit="ratio", source="NeMo-RL"),
        Metric("nemo_rl/mean_seq_mult_prob_error", mean("seq_mult_error", "seqs"), unit="ratio", source="NeMo-RL",
               count="seqs"),
        ExtremeMetric("nemo_rl/max_seq_mult_prob_error", "seq_mult_error", True, unit="ratio", source="NeMo-RL",
                      count="seqs"),
        ExtremeMetric("nemo_rl/min_seq_mult_prob_error", "seq_mult_error", False, unit="ratio", source="NeMo-RL",
                      count="seqs"),
        Metric("nemo_rl/approx_entropy", lambda s: -s["rho_train"] / s["n"], unit="nats", source="NeMo-RL",
               note="with π_θ = π_old, as on the first minibatch"),
        Metric("mismatch_kl/all/mean", k3, unit="nats", source="prime-rl"),
        ExtremeMetric("mismatch_kl/all/max", "k3", True, unit="nats", source="prime-rl"),
        Metric("slime/train_rollout_logprob_abs_diff", mean("seq_abs", "seqs"), unit="nats", source="slime",
               count="seqs", note=by_sample),
        Metric("slime/tis", mean("seq_rho", "seqs"), unit="ratio", source="slime", count="seqs", note=by_sample),
        Metric("slime/tis_abs", mean("seq_deviation", "seqs"), unit="ratio", source="slime", count="seqs",
               note=by_sample),
        Metric("slime/tis_clipfrac", mean("seq_outside", "seqs"), unit="fraction", source="slime", count="seqs",
               note=f"clip [0, {correction.is_upper:g}]; {by_sample}"),
        Metric("openrlhf/vllm_kl", k1, unit="nats", source="OpenRLHF", note="k1"),
        Metric("areal/rollout_train_extreme_frac_tau2", mean("extreme"), unit="fraction", source="AReaL"),
        Metric("areal/behave_imp_weight", mean("rho"), unit="ratio", source="AReaL",
               note="with the proximal policy = the trainer's recomputation"),
        Metric("areal/behave_approx_kl", mean("ell"), unit="nats", source="AReaL", note="its k1 is +ℓ"),
        Metric("policy/rollout_train_logprobs_abs_diff_mean", mean("ell_abs"), unit="nats", source="SkyRL"),
        Metric("policy/rollout_train_logprobs_abs_diff_std", _abs_deviation(1), unit="nats", source="SkyRL"),
        ExtremeMetric("policy/rollout_train_logprobs_abs_diff_max", "ell_abs", True, unit="nats", source="SkyRL"),
        ExtremeMetric("policy/rollout_train_logprobs_abs_diff_min", "ell_abs", False, unit="nats", source="SkyRL"),
        Metric("actor/train_infer_ratio_token_mean", mean("rho"), unit="ratio", source="ROLL"),
        Metric("actor/train_infer_diff_token_mean", lambda s: (s["p_train"] - s["p_rollout"]) / s["n"],
               unit="probability", source="ROLL", note="a difference of probabilities"),
        Metric("open_instruct/vllm_vs_local_logprob_diff_mean", mean("ell_abs"), unit="nats",
               source="open-instruct"),
        ExtremeMetric("open_instruct/vllm_vs_local_logprob_diff_max", "ell_abs", True, unit="nats",
                      source="open-instruct"),
        Metric("open_instruct/vllm_vs_local_logprob_diff_std", _abs_deviation(1), unit="nats",
               source="open-instruct"),
        Metric("minimax_m1/prob_correlation", pearson, source="MiniMax-M1", note="the origin of this metric"),
        Metric("rollout_correction/kl", k1, unit="nats", source="ms-swift", note="sign wrong before #7145"),
        Metric("rollout_correction/k3_kl", lambda s: (s["k3"] - s["k3_over_10"]) / s["n"], unit="nats",
               source="ms-swift", note="each token's value is capped at 10"),
        Metric("rollout_correction/training_ppl", mean("seq_ppl_train", "batch"), unit="perplexity",
               source="ms-swift", count="batch"),
        Metric("rollout_correction/rollout_ppl", mean("seq_ppl_rollout", "batch"), unit="perplexity",
               source="ms-swift", count="batch"),
        Metric("rollout_correction/chi2_token", chi2_token, source="ms-swift"),
        Metric("rollout_correction/chi2_seq", lambda s: s["seq_geometric_sq"] / s["batch"] - 1.0,
               source="ms-swift", count="batch", note="of the geometric ratio, unlike verl's"),
        Metric("rollout_correction/is_weight_mean", mean("weight"), unit="weight", source="ms-swift",
               note="token_truncate"),
        Metric("rollout_correction/ess", _swift_ess, unit="fraction", source="ms-swift",
               note="weights clipped to [1/τ, τ] first"),
        Metric("rollout_correction/clipped_frac", mean("weight_high"), unit="fraction", source="ms-swift",
               note="token_truncate"),
        Metric("slime/ois", mean("current_staleness_ratio", "current_n"), unit="ratio", source="slime",
               count="current_n", needs="current_logprobs", note="weighted by tokens here"),
    ]  # fmt: skip
    return tuple(metrics)


def catalogue(correction: RolloutCorrection, columns: frozenset[str]) -> tuple[Metric | ExtremeMetric, ...]:
    """Every metric that these options define and these columns allow, trueup's own first."""
    every = TRUEUP + verl(correction) + others(correction)
    return tuple(metric for metric in every if metric.needs is None or metric.needs in columns)

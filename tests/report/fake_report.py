"""A report as a real run would give it, computed with plain numpy from synthetic rollouts.

Nothing of the package that measures is used: renderers are tested against the shape of a report, not its makers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from trueup.diagnosis import Cause, Clue, Diagnosis
from trueup.evidence.trace import MISSING, TokenTrace
from trueup.gap import Curve, Gap, GapReport

Floats = npt.NDArray[np.float64]

PROSE = (
    *(
        "Let",
        " x",
        " be",
        " the",
        " number",
        " of",
        " apples",
        ".",
        " Then",
        "\n",
        "3",
        "x",
        " +",
        " 7",
        " =",
        " 22",
    ),
    *(
        ",",
        " so",
        "\n\n",
        "\\(",
        "x",
        " =",
        " 5",
        "\\)",
        ".",
        " We",
        " check",
        ":",
        " 3",
        "·",
        "5",
        " +",
        " 7",
        "\n",
    ),
    *("def", " solve", "(", "n", "):", "\n", "    ", "return", " n", " //", " 3", "\n", "  ", "#", " done", "\t"),
    *(
        "Wait",
        ",",
        " but",
        " 答案",
        " 是",
        " naïve",
        "…",
        " Therefore",
        " the",
        " answer",
        " is",
        " \\boxed",
        "{5}",
    ),
)
METHOD = "cluster bootstrap over 64 prompts, 2,000 resamples, 95 %"
NO_INTERVAL = "no interval: the maximum of a sample has no honest bootstrap interval"


class Rollouts:
    """Synthetic tokens: noise that is small for confident tokens, and another law if ``temperature`` ≠ 1."""

    def __init__(
        self, *, seed: int = 7, sequences: int = 512, temperature: float = 1.0, mean_length: int = 260
    ) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = np.clip(rng.lognormal(math.log(mean_length), 0.6, sequences), 1, 4000).astype(np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        count = int(self.offsets[-1])
        self.position = np.arange(count) - np.repeat(self.offsets[:-1], self.lengths)
        self.group = np.repeat(np.arange(sequences) // 8, self.lengths)
        surprise = rng.gamma(0.35, 1.1, count) + rng.exponential(2e-5, count)
        self.entropy = np.clip(surprise * rng.uniform(0.5, 1.5, count), 1e-6, 8)
        p = np.exp(-surprise)
        growth = 1 + 0.5 * np.log10(1 + self.position)
        scale = 0.045 * (1 - p + 1e-5) * growth
        noise = rng.normal(0, 1, count) * scale - scale**2 / 2
        noise[rng.random(count) < 3e-4] *= 35
        noise[rng.random(count) < 0.02] = 0.0
        self.rollout = -surprise
        self.train = np.minimum(-surprise * (1 / temperature if temperature != 1 else 1) + noise, 0.0)
        self.segment = np.minimum(self.position // 150, 3)
        self.lag = rng.integers(0, 4, count)
        self.repeated = (rng.random(count) < 0.6).astype(np.int64)
        self.log_ratio = self.train - self.rollout
        self.rng = rng


def mean_gap(
    rollouts: Rollouts, name: str, values: Floats, unit: str, *, source: str = "trueup", **extra: Any
) -> Gap:
    """A token mean with an interval from the prompts' spread."""
    count = int(rollouts.group[-1]) + 1
    sums = np.bincount(rollouts.group, values, count)
    tokens = np.bincount(rollouts.group, minlength=count)
    value = float(sums.sum() / tokens.sum())
    error = float(np.sqrt(np.sum((sums - value * tokens) ** 2)) / tokens.sum())
    extra.setdefault("method", METHOD)
    return Gap(name, value, value - 1.96 * error, value + 1.96 * error, len(values), unit, source=source, **extra)


def bare(name: str, value: float, unit: str, n: int, source: str, *, why: str = NO_INTERVAL, **extra: Any) -> Gap:
    return Gap(name, float(value), None, None, n, unit, method=why, source=source, **extra)


def fake_gaps(r: Rollouts) -> tuple[Gap, ...]:
    """About ninety gaps of every source, with missing intervals, NaN and infinity among them."""
    ell, rho = r.log_ratio, np.exp(r.log_ratio)
    pi, mu, n = np.exp(r.train), np.exp(r.rollout), len(r.log_ratio)
    k3 = np.expm1(ell) - ell
    seq = np.repeat(np.arange(len(r.lengths)), r.lengths)
    seq_mean = np.bincount(seq, ell) / r.lengths
    seq_sum = np.bincount(seq, ell)
    one = {"n": n, "source": "trueup"}
    gaps = [
        mean_gap(
            r, "mean_abs_log_ratio", np.abs(ell), "nats", label="Mean size of the log-ratio |ℓ|", worse="higher"
        ),
        bare(
            "max_abs_log_ratio", np.abs(ell).max(), "nats", label="Largest |ℓ| of any token", worse="higher", **one
        ),
        mean_gap(r, "mean_k1", -ell, "nats", label="KL(sampler ‖ trainer), k1 estimate"),
        mean_gap(r, "mean_k3", k3, "nats", label="KL(sampler ‖ trainer), k3 estimate", worse="higher"),
        mean_gap(
            r, "mean_ratio", rho, "", label="Mean ratio ρ = π / μ, 1 if the recorded law is the sampling law"
        ),
        bare(
            "ess_fraction",
            rho.sum() ** 2 / (rho @ rho) / n,
            "fraction",
            label="Effective sample size",
            worse="lower",
            why="no interval: a ratio of sums dominated by its largest terms",
            **one,
        ),
        mean_gap(
            r,
            "surprisal_gap",
            -r.train - r.entropy,
            "nats",
            label="Trainer's surprisal beyond its own entropy",
            train=float(-r.train.mean()),
            infer=float(r.entropy.mean()),
        ),
        mean_gap(
            r,
            "mean_abs_prob_diff",
            np.abs(pi - mu),
            "probability",
            worse="higher",
            train=float(pi.mean()),
            infer=float(mu.mean()),
        ),
        mean_gap(
            r,
            "extreme_fraction",
            (np.abs(ell) > math.log(2)).astype(float),
            "fraction",
            worse="higher",
            label="Tokens whose ratio leaves [½, 2]",
        ),
        bare("prob_pearson", np.corrcoef(pi, mu)[0, 1], "", worse="lower", label="Correlation of π and μ", **one),
        mean_gap(r, "chi2_token", rho**2 - 1, "", note="an estimate, so it can be negative"),
        mean_gap(r, "std_log_ratio", (ell - ell.mean()) ** 2, "nats²"),
        mean_gap(
            r, "sign_fraction", (ell > 0).astype(float), "fraction", label="Tokens that the trainer likes more"
        ),
        mean_gap(r, "zero_fraction", (ell == 0).astype(float), "fraction", label="Tokens with ℓ exactly 0"),
        bare("kurtosis", float(np.mean((ell - ell.mean()) ** 4) / ell.var() ** 2), "", **one),
        bare(
            "chi2_sequence",
            math.inf,
            "",
            why="no interval: the value is not finite",
            **one,
            note="useless for long responses: one sequence whose Σℓ is large decides it",
        ),
        bare("staleness_slope", math.nan, "nats/version", why="no interval: every token has version lag 0", **one),
        bare(
            "top_1pct_share",
            np.sort(np.abs(ell))[-n // 100 :].sum() / np.abs(ell).sum(),
            "fraction",
            **one,
            label="Share of Σ|ℓ| that the worst 1 % of the tokens carry",
        ),
    ]
    token = {"kl": -ell, "k3_kl": k3, "chi2_token": rho**2 - 1}
    gaps += [mean_gap(r, f"rollout_corr/{name}", values, "nats", source="verl") for name, values in token.items()]
    side = {"training": r.train, "rollout": r.rollout}
    for name, logp in side.items():
        per = -np.bincount(seq, logp) / r.lengths
        gaps.append(bare(f"rollout_corr/{name}_ppl", np.exp(per).mean(), "", len(per), "verl"))
        gaps.append(bare(f"rollout_corr/{name}_log_ppl", per.mean(), "nats", len(per), "verl"))
    gaps += [
        bare(
            "rollout_corr/log_ppl_diff",
            -seq_mean.mean(),
            "nats",
            len(seq_mean),
            "verl",
            note="sequence-weighted: equals kl only if all lengths are equal",
        ),
        bare("rollout_corr/log_ppl_abs_diff", np.abs(seq_mean).mean(), "nats", len(seq_mean), "verl"),
        bare("rollout_corr/chi2_seq", np.exp(np.clip(2 * seq_sum, -20, 20)).mean() - 1, "", len(seq_sum), "verl"),
        bare("training/rollout_probs_diff_max", np.abs(pi - mu).max(), "probability", n, "verl"),
        bare("training/rollout_probs_diff_std", np.abs(pi - mu).std(ddof=1), "probability", n, "verl"),
        bare("training/rollout_actor_probs_pearson_corr", np.corrcoef(pi, mu)[0, 1], "", n, "verl"),
    ]
    for mode in (
        "token_k1",
        "token_k3",
        "seq_sum_k1",
        "seq_mean_k3",
        "group_k1_maximum_over_the_sequences_of_a_group",
    ):
        for statistic in ("mean", "max", "min", "std", "fraction_high", "masked_fraction"):
            gaps.append(
                bare(f"rollout_corr/rollout_rs_{mode}_{statistic}", float(r.rng.gamma(1, 0.01)), "", n, "verl")
            )
    framework = {
        "TRL": (
            "sampling/sampling_logp_difference/mean",
            "sampling/sampling_logp_difference/max",
            "sampling/importance_sampling_ratio/min",
            "sampling/importance_sampling_ratio/mean",
            "sampling/importance_sampling_ratio/max",
        ),
        "NeMo-RL": (
            "nemo_rl/token_mult_prob_error",
            "nemo_rl/gen_kl_error",
            "nemo_rl/policy_kl_error",
            "nemo_rl/js_divergence_error",
            "nemo_rl/sampling_importance_ratio",
        ),
        "prime-rl": ("prime_rl/mismatch_kl/mean", "prime_rl/mismatch_kl/max"),
        "slime": ("slime/train_rollout_logprob_abs_diff", "slime/tis", "slime/tis_abs", "slime/tis_clipfrac"),
        "OpenRLHF": ("openrlhf/vllm_kl",),
        "AReaL": ("areal/rollout_train_extreme_frac_tau2", "areal/behave_imp_weight", "areal/behave_approx_kl"),
        "SkyRL": (
            "policy/rollout_train_logprobs_abs_diff_mean",
            "policy/rollout_train_logprobs_abs_diff_std",
            "policy/is_ratio_mean",
            "policy/is_ratio_max",
        ),
        "ROLL": ("actor/train_infer_ratio_token_mean", "actor/train_infer_diff_mean"),
        "ms-swift": (
            "rollout_correction/kl",
            "rollout_correction/k3_kl",
            "rollout_correction/chi2_seq",
            "rollout_correction/ess",
            "rollout_correction/clipped_frac",
        ),
        "open-instruct": (
            "open_instruct/vllm_vs_local_logprob_diff_mean",
            "open_instruct/vllm_vs_local_logprob_diff_max",
        ),
        "MiniMax-M1": ("minimax_m1/prob_pearson",),
    }
    exact = {
        "sampling/sampling_logp_difference/mean": np.abs(ell),
        "nemo_rl/token_mult_prob_error": np.exp(np.abs(ell)),
        "nemo_rl/gen_kl_error": k3,
        "nemo_rl/policy_kl_error": np.expm1(-ell) + ell,
        "openrlhf/vllm_kl": -ell,
        "slime/tis": rho,
        "slime/tis_abs": np.abs(rho - 1),
        "actor/train_infer_ratio_token_mean": rho,
    }
    for source, names in framework.items():
        for name in names:
            if name in exact:
                gaps.append(mean_gap(r, name, exact[name], "", source=source))
            else:
                gaps.append(bare(name, float(r.rng.gamma(2, 0.01)), "", n, source))
    return tuple(gaps)


def binned(r: Rollouts, axis: str, codes: npt.NDArray[np.int64], left: Floats, right: Floats) -> list[Curve]:
    """Mean of |ℓ| and of ℓ by bin; bins of fewer than 20 tokens have no interval."""
    made = []
    n = np.bincount(codes, minlength=len(left))
    for name, values in (("mean_abs_log_ratio", np.abs(r.log_ratio)), ("mean_log_ratio", r.log_ratio)):
        mean = np.bincount(codes, values, len(left)) / np.maximum(n, 1)
        square = np.bincount(codes, values**2, len(left)) / np.maximum(n, 1)
        error = 1.96 * np.sqrt(np.maximum(square - mean**2, 0) / np.maximum(n, 1))
        value = np.where(n > 0, mean, np.nan)
        low = tuple(float(v) if c >= 20 else None for v, c in zip(mean - error, n, strict=True))
        high = tuple(float(v) if c >= 20 else None for v, c in zip(mean + error, n, strict=True))
        edges = (tuple(left.tolist()), tuple(right.tolist()))
        made.append(
            Curve(
                f"{name}_by_{axis}",
                axis,
                "nats",
                *edges,
                tuple(n.tolist()),
                tuple(value.tolist()),
                low,
                high,
                method=METHOD,
            )
        )
    return made


def fake_curves(r: Rollouts) -> tuple[Curve, ...]:
    edges = 10.0 ** np.arange(-8, 1.6, 0.25)
    ell = r.log_ratio
    positive = np.histogram(ell[ell > 0], edges)[0]
    negative = np.histogram(-ell[ell < 0], edges)[0][::-1]
    left = [*(-edges[1:][::-1]), 0.0, *edges[:-1]]
    right = [*(-edges[:-1][::-1]), 0.0, *edges[1:]]
    n = [*negative.tolist(), int((ell == 0).sum()), *positive.tolist()]
    none = (None,) * len(n)
    share = tuple(count / len(ell) for count in n)
    curves = [
        Curve(
            "log_ratio_histogram",
            "log-ratio",
            "share of tokens",
            tuple(map(float, left)),
            tuple(map(float, right)),
            tuple(n),
            share,
            none,
            none,
        )
    ]
    places = np.unique(np.concatenate([np.arange(8), np.geomspace(8, 4096, 19).astype(int)])).astype(float)
    codes = np.searchsorted(places, r.position, side="right") - 1
    curves += binned(r, "position", codes, places, np.append(places[1:], 8192.0))
    for axis, values in (("probability", np.exp(r.rollout)), ("entropy", r.entropy)):
        cuts = np.quantile(values, np.linspace(0, 1, 11))
        codes = np.clip(np.searchsorted(cuts, values, side="right") - 1, 0, 9)
        curves += binned(r, axis, codes, cuts[:-1], cuts[1:])
        if axis == "probability":
            spread = tuple(float(ell[codes == code].std()) for code in range(10))
            last = curves[-1]
            curves.append(
                Curve(
                    "std_log_ratio_by_probability",
                    axis,
                    "nats",
                    last.left,
                    last.right,
                    last.n,
                    spread,
                    (None,) * 10,
                    (None,) * 10,
                    method="no interval",
                )
            )
    for axis, codes in (("segment", r.segment), ("version_lag", r.lag), ("repetition", r.repeated)):
        left_codes = np.arange(int(codes.max()) + 1, dtype=float)
        curves += binned(r, axis, codes, left_codes, left_codes + 1)
    return tuple(curves)


def fake_report(r: Rollouts | None = None) -> GapReport:
    r = r or Rollouts()
    return GapReport(
        gaps=fake_gaps(r),
        curves=fake_curves(r),
        counts={
            "sequences": len(r.lengths),
            "groups": len(r.lengths) // 8,
            "tokens": len(r.log_ratio) + 1204,
            "masked_tokens": 1204,
            "rollout_missing": 3,
            "rollout_nan": 0,
            "rollout_minus_infinity": 2,
            "rollout_sentinel_9999": 0,
            "rollout_exact_zero": 417,
            "train_clamped_above_zero": 0,
            "train_below_minus_100": 0,
            "empty_sequences": 1,
        },
        warnings=(
            "417 sampler log-probabilities are exactly 0: the token was certain, or the sampler greedy.",
            "The file has no entropies for 2 of 512 sequences; the surprisal gap leaves them out.",
        ),
        provenance={
            "command": "trueup diagnose rollouts/step_000120.parquet --html report.html --seed 0",
            "files": ["rollouts/step_000120.parquet"],
            "seed": 0,
            "created": "2026-07-24T09:12:33Z",
            "versions": {"trueup": "0.1.0", "numpy": "2.3.1", "polars": None},
            "bootstrap": {"resamples": 2000, "cluster": "prompt", "level": 0.95},
        },
    )


def fake_worst(r: Rollouts | None = None, *, count: int = 12) -> TokenTrace:
    """The sequences that carry the most, with texts, masked tokens and log-probabilities that cannot be used."""
    r = r or Rollouts()
    carried = np.add.reduceat(np.abs(r.log_ratio), r.offsets[:-1])
    rows = np.argsort(-carried)[:count]
    words = np.array(PROSE, dtype=object)
    spans = [slice(int(r.offsets[row]), int(r.offsets[row + 1])) for row in rows]
    lists: dict[str, list[Any]] = {"ids": [], "rollout": [], "train": [], "mask": [], "entropies": []}
    texts: list[str] = []
    for span in spans:
        size = span.stop - span.start
        ids = np.arange(size) % len(words)
        lists["ids"].append((ids * 37 + 11).tolist())
        texts += words[ids].tolist()
        lists["rollout"].append(r.rollout[span].astype(np.float32))
        lists["train"].append(r.train[span].astype(np.float32))
        lists["entropies"].append(r.entropy[span].tolist())
        mask = np.ones(size, bool)
        mask[20:26] = False
        lists["mask"].append(mask.tolist())
    if lists["rollout"] and len(lists["rollout"][0]) > 12:
        lists["rollout"][0][10], lists["train"][0][11], lists["train"][0][12] = MISSING, np.nan, -np.inf
    size = len(rows)
    return TokenTrace.from_lists(
        lists["ids"],
        lists["rollout"],
        lists["train"],
        mask=lists["mask"],
        entropies=lists["entropies"],
        sequence_id=[f"step120/prompt-{row // 8:03d}/rollout-{row % 8}" for row in rows],
        token_texts=np.array(texts, dtype=object),
        reward=np.arange(size) % 2,
        group=rows // 8,
        prompt=np.array(
            [
                "Ann has three times as many apples as Bo, and seven more than that. Together they have 22. "
                "How many apples does Bo have? Reason step by step and put the answer in \\boxed{}."
            ]
            * size,
            dtype=object,
        ),
    )


NOISE = Diagnosis(
    verdict="honest numerical noise",
    because="The mean ratio is 1 within its error and k1 is not negative: the recorded probabilities are the "
    "sampler's own, and what remains is arithmetic.",
    causes=(
        Cause(
            "RC01",
            "Different kernels in sampler and trainer",
            "Both sides hold the same weights, but reduce in a different order and precision.",
            evidence_for=(
                Clue("F1", "The mean ratio differs from 1 by 0.62 standard errors.", 0.62, 4.0),
                Clue(
                    "F6",
                    "The noise on the logit scale is flat: it varies by a factor of 1.4 over the deciles.",
                    1.4,
                    3.0,
                ),
                Clue("F10", "The two sides line up best at lag 0 (correlation 0.9997).", 0.0),
            ),
            evidence_against=(
                Clue("F17", "The kurtosis of ℓ is 214, heavier than rounding alone explains.", 214.0, 30.0),
            ),
            confirm="Score the same sequences twice in the trainer, alone and in a batch with 63 others.",
            remedy="Truncate the importance weights at 2 (TIS):\n\nalgorithm:\n  rollout_correction:\n"
            "    rollout_is: token\n    rollout_is_threshold: 2.0",
        ),
        Cause(
            "RC14",
            "Expert routing flips in a mixture of experts",
            "A rounding difference sends single tokens to other experts.",
            evidence_for=(Clue("F17", "The worst 1 % of the tokens carry 21 % of the gap.", 0.21, 0.3),),
            evidence_against=(
                Clue("F6", "There is no excess in the least probable decile (0.9 times).", 0.9, 3.0),
            ),
        ),
    ),
    record_next=(
        "entropies: the trainer's entropy at each token tells a sharper sampler from a flatter one.",
        "versions: without the weight version of each token, staleness cannot be told from numerics.",
    ),
)
LAW = Diagnosis(
    "sampling law differs from what was recorded",
    "The mean ratio is 1.21 (z = 38) and k1 is negative: the tokens come from another law than the recorded.",
    (
        Cause(
            "RC29",
            "Raw log-probabilities recorded under a temperature",
            "",
            (Clue("F2", "k1 is −0.031.", -0.031, 0.0),),
        ),
    ),
)
BOOKKEEPING = Diagnosis(
    "book-keeping error",
    "The sides agree best when one of them is shifted by one token (correlation 0.98 against 0.21).",
    (Cause("RC37", "Off by one", "", (Clue("F10", "The best lag is 1.", 1.0, 0.0),)),),
)
UNKNOWN = Diagnosis("cannot tell", "One sequence of one token is too little for a verdict.", ())

"""The first verdict on faults injected by mechanism, on the handbook's pilot bed (policy, section 4.8)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from policy.synthetic import CONTEXTS, Pilot, at, random_trace

from trueup.diagnosis import Diagnosis
from trueup.evidence import TokenTrace
from trueup.policy import diagnose, mismatch
from trueup.policy.diagnose import BOOK_KEEPING, CANNOT_TELL, HONEST_NOISE, LAW_DIFFERS

SEEDS = (0, 1, 2)


def features(diagnosis: Diagnosis, cause: str, side: str = "evidence_for") -> set[str]:
    found = next(c for c in diagnosis.causes if c.name == cause)
    return {clue.feature for clue in getattr(found, side)}


@pytest.fixture(scope="module", params=SEEDS)
def pilot(request: pytest.FixtureRequest) -> Pilot:
    return Pilot(request.param)


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_noise_and_drift_are_honest(pilot: Pilot, sigma: float) -> None:
    law = pilot.noisy(sigma)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(law, tokens), pilot.law)
    diagnosis = diagnose(trace)
    assert diagnosis.verdict == HONEST_NOISE
    assert features(diagnosis, HONEST_NOISE) >= {"F1", "F2", "F3", "F10", "F16"}
    # k3 of logit noise σ on this bed: .0001, .0031 and .0494.
    level = {0.02: 1.25e-4, 0.1: 3.1e-3, 0.4: 4.94e-2}[sigma]
    assert mismatch(trace, replicates=0)["mean_k3"].value == pytest.approx(level, rel=0.15)
    assert ("large for rounding" in diagnosis.because) == (sigma == 0.4)


def test_rare_large_jumps_are_honest(pilot: Pilot) -> None:
    # Mixture-of-experts flips: p = .002, size N(0, 2²).
    jump = (pilot.rng.random((CONTEXTS, 1)) < 0.002) * pilot.rng.normal(0, 2, pilot.logits.shape)
    shifted = pilot.logits + jump
    law = shifted - np.logaddexp.reduce(shifted, axis=1, keepdims=True)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(law, tokens), pilot.law)
    assert diagnose(trace).verdict == HONEST_NOISE
    report = mismatch(trace, replicates=0)
    assert report["log_ratio_kurtosis"].value > 300
    # A fifth of a percent of the tokens carry nearly everything.
    assert report["top_1pct_token_share"].value > 0.9


def test_bfloat16_storage_is_honest_and_seen(pilot: Pilot) -> None:
    tokens = pilot.sample(pilot.law)
    trace = pilot.trace(tokens, at(pilot.law, tokens), pilot.law)
    bits = trace.rollout_logprobs.view(np.uint32)
    stored = ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)
    trace = dataclasses.replace(trace, rollout_logprobs=stored)
    assert diagnose(trace).verdict == HONEST_NOISE
    assert mismatch(trace, replicates=0)["bf16_grid_fraction"].infer == 1.0


def test_temperature_recorded_raw(pilot: Pilot) -> None:
    # RC29: sampled at .6, recorded at 1, the trainer divides by .6.
    law = pilot.tempered(0.6)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(pilot.law, tokens), law)
    diagnosis = diagnose(trace)
    assert diagnosis.verdict == LAW_DIFFERS
    assert features(diagnosis, LAW_DIFFERS) == {"F1", "F2"}
    report = mismatch(trace, replicates=0)
    assert report["mean_ratio"].value == pytest.approx(1.219, abs=0.02)
    assert report["mean_k1"].value == pytest.approx(-0.128, abs=0.01)
    assert report["mean_ratio_z_independent"].value > 80
    assert report["positive_fraction"].value == pytest.approx(0.81, abs=0.02)


def test_temperature_missing_in_the_trainer_needs_the_entropy(pilot: Pilot) -> None:
    # RC30: both identities hold; only the trainer's surprisal tells.
    law = pilot.tempered(0.6)
    tokens = pilot.sample(law)
    diagnosis = diagnose(pilot.trace(tokens, at(law, tokens), pilot.law))
    assert diagnosis.verdict == LAW_DIFFERS
    assert features(diagnosis, LAW_DIFFERS) == {"F3"}
    assert features(diagnosis, LAW_DIFFERS, "evidence_against") == {"F1", "F2"}
    blind = diagnose(pilot.trace(tokens, at(law, tokens), pilot.law, entropies=False))
    assert blind.verdict == HONEST_NOISE
    assert any(wanted.startswith("entropies") for wanted in blind.record_next)


@pytest.mark.parametrize("fault", ["temperature", "top-p"])
def test_raw_on_both_sides_is_silent_but_for_the_surprisal(pilot: Pilot, fault: str) -> None:
    law = pilot.tempered(0.6) if fault == "temperature" else pilot.truncated(0.9)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(pilot.law, tokens), pilot.law)
    assert diagnose(trace).verdict == LAW_DIFFERS
    blind = diagnose(dataclasses.replace(trace, entropies=None))
    assert blind.verdict == CANNOT_TELL
    assert "F21" in features(blind, CANNOT_TELL)
    expected = -0.481 if fault == "temperature" else -0.231
    assert mismatch(trace, replicates=0)["surprisal_gap"].value == pytest.approx(expected, abs=0.02)


def test_truncated_and_renormalised(pilot: Pilot) -> None:
    # RC31 at top-p .9: ℓ = log S <= 0 everywhere, mean ρ = the kept mass.
    law = pilot.truncated(0.9)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(law, tokens), pilot.law)
    diagnosis = diagnose(trace)
    assert diagnosis.verdict == LAW_DIFFERS
    assert "F1" in features(diagnosis, LAW_DIFFERS)
    report = mismatch(trace, replicates=0)
    assert report["mean_ratio"].value == pytest.approx(0.926, abs=0.01)
    assert report["mean_k3"].value == pytest.approx(0.0034, abs=0.0005)
    assert report["positive_fraction"].value < 0.01


def test_wrong_dictionary_entry(pilot: Pilot) -> None:
    # RC35: the most probable token's log-probability is stored, whatever was sampled.
    tokens = pilot.sample(pilot.law)
    trace = pilot.trace(tokens, pilot.law.max(axis=1), pilot.law)
    assert diagnose(trace).verdict == LAW_DIFFERS
    assert mismatch(trace, replicates=0)["mean_ratio"].value == pytest.approx(0.663, abs=0.01)


@pytest.mark.parametrize("lag", [1, -1, 2])
def test_shift(pilot: Pilot, lag: int) -> None:
    tokens = pilot.sample(pilot.law)
    recorded = np.roll(at(pilot.law, tokens).reshape(-1, 50), lag, axis=1).ravel()
    trace = pilot.trace(tokens, recorded, pilot.law)
    diagnosis = diagnose(trace)
    assert diagnosis.verdict == BOOK_KEEPING
    assert "F10" in features(diagnosis, BOOK_KEEPING)
    assert "shifted" in diagnosis.because
    # log μ of a token stands ``lag`` places further on.
    assert mismatch(trace, replicates=0)["best_lag"].value == lag


def test_rows_of_another_sample(pilot: Pilot) -> None:
    tokens = pilot.sample(pilot.law)
    recorded = np.roll(at(pilot.law, tokens).reshape(-1, 50), 7, axis=0).ravel()
    diagnosis = diagnose(pilot.trace(tokens, recorded, pilot.law))
    assert diagnosis.verdict == BOOK_KEEPING
    assert "hardly agree" in diagnosis.because


def test_tool_tokens_with_placeholders(pilot: Pilot) -> None:
    # RC39: 10% of the tokens were not sampled and carry 0.0.
    tokens = pilot.sample(pilot.law)
    tool = pilot.rng.random(CONTEXTS) < 0.1
    tokens = np.where(tool, pilot.rng.integers(0, 60, CONTEXTS), tokens)
    trace = pilot.trace(tokens, np.where(tool, 0.0, at(pilot.law, tokens)), pilot.law)
    diagnosis = diagnose(trace)
    assert diagnosis.verdict == BOOK_KEEPING
    assert "exactly 0.0" in diagnosis.because
    # Masked, as it should be, the same trace is clean: the two sides agree, and the law is the trainer's.
    masked = diagnose(dataclasses.replace(trace, mask=~tool))
    assert masked.verdict == CANNOT_TELL
    assert "F21" in features(masked, CANNOT_TELL)


@pytest.mark.parametrize("value", [np.nan, -np.inf, -9999.0])
def test_unrecorded_values_are_a_book_keeping_error(pilot: Pilot, value: float) -> None:
    law = pilot.noisy(0.02)
    tokens = pilot.sample(law)
    trace = pilot.trace(tokens, at(law, tokens), pilot.law)
    rollout = trace.rollout_logprobs.copy()
    rollout[::20] = value
    diagnosis = diagnose(dataclasses.replace(trace, rollout_logprobs=rollout))
    assert diagnosis.verdict == BOOK_KEEPING
    assert diagnosis.because.startswith("5.00%")
    # A few of them are an accident: counted, excluded, and no verdict.
    rollout = trace.rollout_logprobs.copy()
    rollout[::1000] = value
    assert diagnose(dataclasses.replace(trace, rollout_logprobs=rollout)).verdict == HONEST_NOISE


def test_too_little_data_cannot_tell() -> None:
    few = random_trace(np.random.default_rng(0), sequences=5, noise=0.01)
    diagnosis = diagnose(few)
    assert diagnosis.verdict == CANNOT_TELL
    assert any("more data" in wanted for wanted in diagnosis.record_next)
    trace = TokenTrace.from_lists([[1]], [[float("nan")]], [[-1.0]])
    assert diagnose(trace).verdict == BOOK_KEEPING


def test_false_alarms_on_honest_noise_are_rare() -> None:
    # Small honest traces (40 sequences of 50 tokens, groups of 4): three tests at one in a thousand each. Of 200,
    # two wrong verdicts would already be a surprise (probability .12); four would happen once in 700 times.
    pilot = Pilot(99)
    law = pilot.noisy(0.1)
    wrong = 0
    for seed in range(10):
        pilot.rng = np.random.default_rng(seed)
        tokens = pilot.sample(law)
        trace = pilot.trace(tokens, at(law, tokens), pilot.law)
        for start in range(0, 800, 40):
            wrong += diagnose(trace.block(start, start + 40)).verdict not in (HONEST_NOISE, CANNOT_TELL)
    assert wrong < 4


def test_diagnosis_is_plain_data() -> None:
    plain = diagnose(random_trace(np.random.default_rng(0), noise=0.01)).to_dict()
    assert plain["causes"][0]["name"] == plain["verdict"]
    assert {cause["name"] for cause in plain["causes"]} == {HONEST_NOISE, LAW_DIFFERS, BOOK_KEEPING, CANNOT_TELL}
    assert all(cause["probability"] is None for cause in plain["causes"])

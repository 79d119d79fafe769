"""The recorded trace is held to the figures that its README states, computed here with NumPy alone."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from trueup.examples import ROLLOUT_COLUMN, TRAIN_COLUMN, demo_prompts, smollm2_trace


@pytest.fixture(scope="module")
def trace():
    return pq.read_table(smollm2_trace())


def flat(trace, column):
    return trace[column].combine_chunks().flatten().to_numpy()


@pytest.mark.parametrize(
    ("column", "mean_abs", "max_abs", "mean_k3", "ess"),
    [
        (TRAIN_COLUMN, 0.033413, 0.421843, 0.00123957, 0.997518),
        ("train_logprobs_bf16", 0.042200, 0.579273, 0.00208415, 0.995819),
    ],
)
def test_the_recorded_mismatch_is_the_stated_one(trace, column, mean_abs, max_abs, mean_k3, ess):
    d = flat(trace, column).astype(np.float64) - flat(trace, ROLLOUT_COLUMN)
    ratio = np.exp(d)

    assert np.abs(d).mean() == pytest.approx(mean_abs, rel=1e-5, abs=5e-7)
    assert np.abs(d).max() == pytest.approx(max_abs, rel=1e-5)
    assert (np.expm1(d) - d).mean() == pytest.approx(mean_k3, rel=1e-5)
    assert ratio.sum() ** 2 / (ratio**2).sum() / len(d) == pytest.approx(ess, rel=1e-5)


def test_every_list_has_a_value_a_token(trace):
    lengths = np.diff(trace["response_ids"].combine_chunks().offsets)
    assert (len(trace), lengths.sum()) == (256, 10_292)
    for column in ("token_texts", ROLLOUT_COLUMN, TRAIN_COLUMN, "train_logprobs_bf16", "train_entropy"):
        np.testing.assert_array_equal(np.diff(trace[column].combine_chunks().offsets), lengths, err_msg=column)


def test_token_texts_join_to_the_responses(trace):
    broken = 0
    for texts, response in zip(trace["token_texts"].to_pylist(), trace["response"].to_pylist(), strict=True):
        joined = "".join(texts)
        if "\ufffd" in joined:
            broken += 1  # part of a character: the text around it is right, this much the README states
        else:
            assert joined.removesuffix("<|im_end|>").strip() == response.strip()
    assert broken == 5


def test_the_package_stays_small():
    assert smollm2_trace().stat().st_size < 400_000


def test_there_are_thirty_two_different_prompts():
    prompts = demo_prompts()
    assert len(prompts) == len(set(prompts)) == 32
    assert all(prompt == prompt.strip() and 10 < len(prompt) < 120 for prompt in prompts)

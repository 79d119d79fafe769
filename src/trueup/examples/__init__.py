"""Packaged examples: a trace recorded on a real model, and the prompts of ``trueup demo``.

Where the trace comes from is written in ``README.md`` beside this file.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

#: Columns of the recorded trace that hold the two sides: the bfloat16 sampler and the float32 trainer.
ROLLOUT_COLUMN, TRAIN_COLUMN = "rollout_logprobs", "train_logprobs_fp32"


def smollm2_trace() -> Path:
    """The recorded trace as a Parquet file: 256 responses of SmolLM2-135M-Instruct, sampled by vLLM in bfloat16.

    >>> smollm2_trace().name
    'smollm2-135m-vllm-bf16.parquet'
    """
    return _packaged("smollm2-135m-vllm-bf16.parquet")


def demo_prompts() -> tuple[str, ...]:
    """32 short user messages that a small model answers at length: facts, sums, rewriting, lists, code, stories.

    >>> len(demo_prompts())
    32
    """
    return tuple(_packaged("demo_prompts.txt").read_text(encoding="utf-8").splitlines())


def _packaged(name: str) -> Path:
    return Path(str(files("trueup.examples") / name))

"""Synthetic token traces made by mechanism: a true sampling law, a recorded one, and the trainer's."""

from __future__ import annotations

import numpy as np

from trueup.evidence import TokenTrace

CONTEXTS, VOCABULARY, LENGTH = 40_000, 60, 50


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Pilot:
    """The handbook's pilot bed (policy, section 4.8): logits N(0, 1) times a Gamma(2, 2) scale a context."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.logits = self.rng.normal(size=(CONTEXTS, VOCABULARY)) * self.rng.gamma(2.0, 2.0, (CONTEXTS, 1))
        self.law = log_softmax(self.logits)

    def noisy(self, sigma: float) -> np.ndarray:
        return log_softmax(self.logits + sigma * self.rng.normal(size=self.logits.shape))

    def tempered(self, temperature: float) -> np.ndarray:
        return log_softmax(self.logits / temperature)

    def truncated(self, top_p: float) -> np.ndarray:
        """Top-p, renormalised: the smallest set of the most probable tokens that holds ``top_p``."""
        order = np.argsort(-self.law, axis=1)
        sorted_p = np.exp(np.take_along_axis(self.law, order, axis=1))
        kept_sorted = np.cumsum(sorted_p, axis=1) - sorted_p < top_p
        kept = np.zeros_like(kept_sorted)
        np.put_along_axis(kept, order, kept_sorted, axis=1)
        return log_softmax(np.where(kept, self.law, -np.inf))

    def sample(self, law: np.ndarray) -> np.ndarray:
        """One token a context (Gumbel-max)."""
        return np.argmax(law + self.rng.gumbel(size=law.shape), axis=1)

    def trace(
        self, tokens: np.ndarray, recorded: np.ndarray, train: np.ndarray, *, entropies: bool = True
    ) -> TokenTrace:
        """``recorded`` are log μ of the tokens [N]; ``train`` is the trainer's whole law [N, V]."""
        rows = np.arange(len(tokens))
        p = np.exp(train)
        entropy = -(p * np.where(p > 0, train, 0.0)).sum(axis=1)
        sequences = CONTEXTS // LENGTH
        return TokenTrace(
            offsets=np.arange(0, CONTEXTS + 1, LENGTH, dtype=np.int64),
            token_ids=tokens.astype(np.int32),
            rollout_logprobs=recorded.astype(np.float32),
            train_logprobs=train[rows, tokens].astype(np.float32),
            mask=np.ones(CONTEXTS, dtype=np.bool_),
            sequence_id=np.arange(sequences),
            group=np.arange(sequences) // 4,
            entropies=entropy.astype(np.float32) if entropies else None,
        )


def at(law: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probability of each context's token."""
    return law[np.arange(len(tokens)), tokens]


def random_trace(
    rng: np.random.Generator, *, sequences: int = 40, longest: int = 30, noise: float = 0.3, holes: bool = True
) -> TokenTrace:
    """A ragged trace with masked tokens and (with ``holes``) empty sequences; no law behind it."""
    lengths = rng.integers(0 if holes else 1, longest + 1, sequences)
    tokens = int(lengths.sum())
    rollout = -rng.exponential(1.0, tokens).astype(np.float32)
    train = np.minimum(rollout + rng.normal(0, noise, tokens), 0).astype(np.float32)
    mask = rng.random(tokens) < 0.85
    return TokenTrace(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token_ids=rng.integers(0, 50, tokens).astype(np.int32),
        rollout_logprobs=rollout,
        train_logprobs=train,
        mask=mask,
        sequence_id=np.arange(sequences),
        group=rng.integers(0, 12, sequences),
        entropies=rng.exponential(1.0, tokens).astype(np.float32),
        segments=rng.integers(0, 4, tokens).astype(np.int32),
        versions=rng.integers(0, 5, tokens).astype(np.int32),
    )

"""How fast the one-pass kernel is beside padded PyTorch, in one process and on the same arrays.

Prints ratios; absolute times belong to the machine. Run with ``make bench``.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable

import numpy as np
import psutil
import torch
from padded_torch import off_policy_metrics, rejection_metrics, weight_metrics

from trueup.evidence import TokenTrace
from trueup.policy import report_mismatch, scan_trace

SEQUENCES, LONGEST = 1024, 4096


def make_trace(rng: np.random.Generator) -> TokenTrace:
    """1024 responses of up to 4096 tokens in groups of 8: bfloat16-like noise, token ids by Zipf's law."""
    lengths = rng.integers(1, LONGEST + 1, SEQUENCES)
    lengths[0] = LONGEST
    tokens = int(lengths.sum())
    rollout = -rng.exponential(0.5, tokens).astype(np.float32)
    train = np.minimum(rollout + rng.normal(0, 0.03, tokens).astype(np.float32), np.float32(0))
    return TokenTrace(
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        token_ids=np.minimum(rng.zipf(1.2, tokens), 49_999).astype(np.int32),
        rollout_logprobs=rollout,
        train_logprobs=train,
        mask=np.ones(tokens, dtype=np.bool_),
        sequence_id=np.arange(SEQUENCES),
        group=np.arange(SEQUENCES) // 8,
    )


def pad(trace: TokenTrace, values: np.ndarray) -> torch.Tensor:
    padded = np.zeros((len(trace), LONGEST), dtype=values.dtype)
    for row, (start, stop) in enumerate(zip(trace.offsets[:-1], trace.offsets[1:], strict=True)):
        padded[row, : stop - start] = values[start:stop]
    return torch.from_numpy(padded)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def peak_extra_memory(function: Callable[[], object]) -> float:
    """MB of resident memory above the level at the start, sampled every half millisecond."""
    process = psutil.Process()
    start = process.memory_info().rss
    peak, done = start, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return (peak - start) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11, help="runs of each, in turn")
    repeats = parser.parse_args().repeats
    trace = make_trace(np.random.default_rng(0))
    train, rollout = pad(trace, trace.train_logprobs), pad(trace, trace.rollout_logprobs)
    mask = pad(trace, trace.mask).to(torch.int64)

    def padded() -> dict[str, float]:
        with torch.inference_mode():
            ell = train - rollout
            return (
                weight_metrics(ell, mask)
                | rejection_metrics(ell, mask, options={"seq_mean_k1": (0.999, 1.001)})
                | off_policy_metrics(train, rollout, mask)
            )

    sums = scan_trace(trace)
    report = report_mismatch(sums, replicates=2)
    worst = max(
        abs(report[f"rollout_corr/{name}"].value - value) / max(abs(value), 1e-3)
        for name, value in padded().items()
    )
    kernel_memory = peak_extra_memory(lambda: scan_trace(trace))
    padded_memory = peak_extra_memory(padded)
    # In turn, so that a drifting machine drifts for all three alike; medians, since each has its own hiccups.
    runs = np.array(
        [
            (
                seconds(padded),
                seconds(lambda: scan_trace(trace)),
                seconds(lambda: report_mismatch(scan_trace(trace))),
            )
            for _ in range(repeats)
        ]
    )
    baseline, kernel, whole = np.median(runs, axis=0)
    ratios, whole_ratios = runs[:, 0] / runs[:, 1], runs[:, 0] / runs[:, 2]
    print(
        f"{SEQUENCES} sequences x up to {LONGEST} tokens: {trace.num_tokens:,} tokens, {mask.numel():,} padded; "
        f"{torch.get_num_threads()} torch threads; medians of {repeats} runs in turn"
    )
    print(f"padded PyTorch, verl's metrics, no intervals   {baseline:8.3f} s   {padded_memory:7.0f} MB extra")
    print(f"one-pass kernel, all sums and curves           {kernel:8.3f} s   {kernel_memory:7.0f} MB extra")
    print(f"kernel and report with 1000 resamples          {whole:8.3f} s")
    print(
        f"kernel is {np.median(ratios):.1f} times faster ({ratios.min():.1f} to {ratios.max():.1f}); "
        f"with all intervals {np.median(whole_ratios):.1f} times"
    )
    print(f"kernel: {trace.num_tokens / kernel / 1e6:.0f} million tokens a second")
    print(f"largest relative difference of a common metric: {worst:.1e} (float32 sums against float64)")


if __name__ == "__main__":
    main()

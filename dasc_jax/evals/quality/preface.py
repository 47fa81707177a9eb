"""What the reader of the quality page must know beside its numbers: setting, gaps, origin."""

from collections.abc import Callable
from pathlib import Path

from dasc_jax.evals.quality import markdown as md
from dasc_jax.evals.quality.cells import COLD, EXACT, ArmKey, Store
from dasc_jax.evals.quality.measure import arms_of, key_of
from dasc_jax.evals.quality.summary import models_of
from dasc_jax.evals.ruler import SHORT, TASKS
from dasc_jax.plan import RANDOM_SEEDS

MODELS = ("kimi-linear-mini", "qwen3-next-mini")
LENGTHS = (1088, 2048, 4096)
INSTANCES = 30
ROUNDS = 3
THRESHOLDS = (0, 16, 64, 128, 512, 1024)
"""Of the whole study."""

GROUPS: tuple[tuple[str, Callable[[ArmKey], bool]], ...] = (
    ("all int8 arms", lambda key: key.quantization is not None),
    ("all random masks", lambda key: key.selector == "random"),
    ("all wr arms", lambda key: key.policy == "wr"),
    ("all int8 wr arms", lambda key: key.policy == "wr" and key.quantization is not None),
)
"""Arms that are named together where all of them are missing."""


def differences(store: Store) -> str:
    """How the study differs from the paper's."""
    lines = [
        "## What differs from the paper",
        "",
        "- **Models.** The paper measures Kimi-Linear-48B and Qwen3-Next-80B; these are trained"
        " minis of 6.7 and 6.3 million parameters with six recurrent and two attention layers. They"
        " know RULER's templates from training (with other words, numbers and names) and little"
        " else. What is shown is how the method behaves on them, not how good the released models"
        " are.",
        "- **CWE and QA-H are weak without any cache,** as the cold runs below show. The minis"
        " learned in part to name the most common words, and hardly ever to combine two facts: of"
        " QA-H's last training rows 5 and 8 % were right, of QA-S's 99 and 100 % (model cards). A"
        " score near zero cannot fall, so QA-H tells nothing of a cache here and makes a fall of"
        " the mean smaller by a thirteenth.",
        f"- **Lengths.** {_lengths(store)} tokens, prompt and answer together; the paper has 4k,"
        " 8k and 16k. Where a refresh window is as long as the cached prefix, wr recomputes all of"
        " it and equals a cold run by construction.",
        "- **Questions.** QA-S and QA-H are about invented people and towns, not SQuAD and"
        " HotpotQA. Haystacks are another novel than RULER's essays.",
        "- **Units.** A layer has 256 units in kimi-linear-mini (64 channels of 4 heads) but only"
        " four, its heads, in qwen3-next-mini, where the paper's models have 4,096 and 32: its"
        " plans are coarse, and rho over four heads takes only steps of 0.2.",
        "- **Arithmetic.** One device and one rank; weights, activations and convolution windows in"
        f" {_dtypes(store)}, the paper's in bfloat16 on eight. Convolution windows are a larger"
        " part of these small checkpoints, so that the same units dropped save less.",
        "- **Tests.** Instances of all tasks are pooled for a mean's interval. p is the paper's"
        " centred bootstrap, *p sign* the sign-flip test, which is the safer one where few"
        " differences are not zero. *p Holm* adjusts p over the arms of one table.",
        "",
    ]
    return "\n".join(lines)


def _lengths(store: Store) -> str:
    found = {cell.length for cell in store.cells}
    return md.listed([f"{length:,}" for length in sorted(found or LENGTHS)])


def _dtypes(store: Store) -> str:
    return md.listed(sorted({cell.dtype for cell in store.cells})) or "float32"


def gaps(store: Store) -> str:
    """What a reader of the whole study would expect and does not find; empty if nothing."""
    said = []
    if counts := sorted({c.n for c in store.cells if c.n < INSTANCES}):
        numbers = md.listed([str(n) for n in counts])
        said.append(
            f"{numbers} instances a task and length instead of {INSTANCES}: one instance moves its"
            f" task's score by up to {1 / counts[0]:.2f}, and a sign-flip test over one task gives"
            f" at least p = {min(1.0, 2 / 2 ** counts[0]):.2g}"
        )
    for rounds in sorted({c.rounds for c in store.cells if c.policy != "cold"} - {ROUNDS}):
        lengths = sorted({c.length for c in store.cells if c.rounds == rounds and c.arm != COLD})
        where = md.listed([f"{length:,}" for length in lengths])
        word = "round" if rounds == 1 else "rounds"
        said.append(f"{rounds} replay {word} instead of {ROUNDS} at {where} tokens (greedy)")
    said += [f"{model} was not measured" for model in MODELS if model not in models_of(store)]
    for model in models_of(store):
        said += _missing(store, model)
    if not said:
        return ""
    return "\n".join(["## What is missing of the study", "", *(f"- {text}." for text in said), ""])


def _missing(store: Store, model: str) -> list[str]:
    said = []
    for length in LENGTHS:
        if not store.select(model, length, EXACT):
            some = "cold runs alone" if store.select(model, length, COLD) else "nothing"
            said.append(f"{model} has {some} at {length:,} tokens")
            continue
        if words := _lacking(store, model, length):
            said.append(f"{model} lacks at {length:,} tokens: {md.listed(words)}")
        tasks = store.select(model, length, EXACT)
        if absent := [SHORT[task] for task in TASKS if task not in tasks]:
            said.append(f"{model} lacks at {length:,} tokens the tasks {md.listed(absent)}")
    for kind, name in (("table_1b", "Table 1"), ("drift", "the drift over turns")):
        if not store.noted(kind, model):
            said.append(f"{model} lacks {name}")
    return said


def _lacking(store: Store, model: str, length: int) -> list[str]:
    """Arms by name, whole groups of them by the group's."""
    whole = {key_of(arm) for arm in arms_of(THRESHOLDS, ("float32", "int8"), RANDOM_SEEDS)}
    lacking = {key for key in whole if not store.select(model, length, key)}
    words = []
    for name, belongs in GROUPS:
        group = {key for key in whole if belongs(key)}
        if group and group <= lacking:
            words.append(name)
            whole, lacking = whole - group, lacking - group
    masks = sum(key.selector == "random" for key in lacking)
    single = [key for key in lacking if key.selector == "dasc"]
    single.sort(key=lambda key: (key.quantization or "", key.policy, key.w_max))
    words += [md.arm(key) for key in single]
    return words + ([f"{masks} of the random masks"] if masks else [])


def origin(store: Store, lines: Path) -> str:
    """Machine, date and command of every line."""
    runs = [(c.model, c.device, c.date, c.command) for c in store.cells]
    runs += [(note.model, *note.run) for note in store.notes if note.run]
    weights = dict.fromkeys(f"{c.model} {c.weights}" for c in store.cells)
    folder = lines.with_suffix("").name
    said = [
        f"## Where the numbers come from\n\n`{lines.name}` has a line for every model, task, length"
        " and arm with the scores of its instances, machine, date and command;"
        f" `{folder}/` has the tables and figures of each model."
        " `scripts/reproduce_quality.py` measures all of it, with `--merge FILE...` it takes in"
        " what was measured elsewhere, and with `--parts` alone it makes this page. Decay"
        f" parameters: {md.listed(list(weights)) or 'none'}.\n"
    ]
    for device, date in dict.fromkeys((device, date) for _, device, date, _ in runs):
        commands = dict.fromkeys(run[3] for run in runs if run[1:3] == (device, date))
        said += [f"{device}, {date}:\n", *(f"- `{command}`" for command in commands), ""]
    return "\n".join(said)

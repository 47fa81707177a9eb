"""What the reader of the quality page must know before its first number."""

from dasc_jax.evals import quality_markdown as md
from dasc_jax.evals.arms import DENSE
from dasc_jax.evals.quality_cells import COLD, Cell, Store
from dasc_jax.evals.quality_measure import arms_of, key_of
from dasc_jax.evals.quality_summary import keys_of, models_of
from dasc_jax.evals.ruler import SHORT, TASKS
from dasc_jax.plan import RANDOM_SEEDS

MODELS = ("kimi-linear-mini", "qwen3-next-mini")
LENGTHS = (1088, 2048, 4096)
INSTANCES = 30
ROUNDS = 3
THRESHOLDS = (0, 16, 64, 128, 512, 1024)
"""Of the whole study."""


def differences(store: Store) -> str:
    """The first section: differences from the paper, what is missing of the study, its origin."""
    lines = [
        "## What differs from the paper",
        "",
        "- **Models.** The paper measures Kimi-Linear-48B and Qwen3-Next-80B. These are trained"
        " minis of some 6.6 million parameters, eight layers, six of them recurrent, that know"
        " RULER's templates from training (with other words, numbers and names) and little else."
        " They retrieve nearly perfectly and aggregate badly: low CWE and QA-H scores are theirs,"
        " in the dense and cold runs as well.",
        f"- **Lengths.** {_lengths(store)} tokens, prompt and answer together; the paper has 4k,"
        " 8k and 16k."
        " Where a refresh window is longer than a prompt, wr recomputes all of it.",
        "- **Questions.** QA-S and QA-H are about invented people and towns, not SQuAD and"
        " HotpotQA. Haystacks are another novel than RULER's essays.",
        "- **Arithmetic.** One device and one rank; weights, activations and convolution windows in"
        f" {_dtypes(store)}, the paper's in bfloat16 on eight. Convolution windows are a larger"
        " part of these small checkpoints, so that the same units dropped save less.",
        "- **Tests.** Instances of all tasks are pooled for a mean's interval. p is the paper's"
        " centred bootstrap, *p sign* the sign-flip test, which is the safer one where few"
        " differences are not zero. *p Holm* adjusts p over the arms of one table.",
        "",
        *_reduced(store),
        "## Where the numbers come from",
        "",
        *_origin(store.cells),
        "",
    ]
    return "\n".join(lines)


def _lengths(store: Store) -> str:
    found = {cell.length for cell in store.cells}
    return md.listed([f"{length:,}" for length in sorted(found or LENGTHS)])


def _dtypes(store: Store) -> str:
    return md.listed(sorted({cell.dtype for cell in store.cells})) or "float32"


def _reduced(store: Store) -> list[str]:
    """What a reader of the whole study would expect and does not find."""
    said = []
    if counts := sorted({c.n for c in store.cells if c.n < INSTANCES}):
        numbers = md.listed([str(n) for n in counts])
        said.append(
            f"{numbers} instances a task and length instead of {INSTANCES}: one instance moves its"
            f" task's score by up to {1 / counts[0]:.2f}, and a sign-flip test over one task gives"
            f" at least p = {min(1.0, 2 / 2 ** counts[0]):.2g}"
        )
    if rounds := sorted({c.rounds for c in store.cells if c.policy != "cold"} - {ROUNDS}):
        numbers = md.listed([str(n) for n in rounds])
        said.append(f"{numbers} replay round instead of {ROUNDS} (decoding is greedy)")
    said += [f"{model} was not measured" for model in MODELS if model not in models_of(store)]
    for model in models_of(store):
        said += _missing(store, model)
    if not said:
        return []
    items = [f"- {text}." for text in said]
    return ["## This is a reduced run", "", *items, ""]


def _missing(store: Store, model: str) -> list[str]:
    whole = {key_of(arm) for arm in arms_of(THRESHOLDS, ("float32", "int8"), RANDOM_SEEDS)}
    said = []
    for length in LENGTHS:
        found = {key for kind in ("dasc", "random") for key in keys_of(store, model, length, kind)}
        if not found:
            also = "" if store.select(model, length, COLD) else " nor a cold run"
            said.append(f"{model} has no replay{also} at {length:,} tokens")
            continue
        lacking = whole - found
        dropped = [key for key in lacking if key.selector == "dasc"]
        dropped.sort(key=lambda key: (key.quantization or "", key.policy, key.w_max))
        plain = [md.arm(key) for key in dropped]
        masks = sum(key.selector == "random" for key in lacking)
        words = [*plain, *([f"{masks} of the random masks"] if masks else [])]
        if words:
            said.append(f"{model} lacks at {length:,} tokens: {md.listed(words)}")
        tasks = store.select(model, length, key_of(DENSE))
        if absent := [SHORT[task] for task in TASKS if task not in tasks]:
            said.append(f"{model} lacks at {length:,} tokens the tasks {md.listed(absent)}")
    for kind, name in (("table_1b", "Table 1"), ("drift", "the drift over turns")):
        if not store.noted(kind, model):
            said.append(f"{model} lacks {name}")
    return said


def _origin(cells: list[Cell]) -> list[str]:
    runs = dict.fromkeys((c.model, c.weights, c.device, c.date, c.command) for c in cells)
    return [
        f"- {model} (decay parameters {weights}), {date}, {device}: `{command}`"
        for model, weights, device, date, command in runs
    ]

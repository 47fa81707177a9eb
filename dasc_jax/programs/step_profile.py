"""Where the time of a compiled step goes: the kernels it launches, by the part of the model.

XLA names a kernel after the instruction it was made from, and the program's text names the Python
frames behind every instruction; that leads from a kernel to the function that asked for it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

LIBRARY = re.compile(r"cublas|cutlass|nvjet|gemm|gemv|splitK", re.IGNORECASE)
"""Matrix products of NVIDIA's libraries, whose names say nothing of where they came from."""

PARTS: tuple[tuple[str, str], ...] = (
    (r"Experts\.|grouped_matmul|grouped|experts", "experts"),
    (r"Router\.|router", "router"),
    (r"MoE\.|FeedForward\.", "shared expert and dense feed-forward"),
    (r"paged_attention|attend|attention|mla", "attention"),
    (r"PagedMixer\.|LatentAttention\.|GatedAttention\.", "attention projections"),
    (r"delta_|kda_prep|kda_walk|gdn_prefill", "delta rule"),
    (r"short_conv|next_windows|conv_windows", "short convolution"),
    (r"Linear\..*DeltaMixer\.", "delta projections"),
    (r"DeltaMixer\.", "delta gates and norms"),
    (r"sample|greedy", "sampling"),
    (r"HybridModel\.logits|Embedding\.", "embedding and logits"),
    (r"HybridModel\.|RMSNorm|normalise", "residual stream and norms"),
)
"""(pattern of a frame or of a kernel's name, part); the first that matches counts."""


class Share(NamedTuple):
    """What a part of the model takes of a step."""

    part: str
    ms: float
    kernels: float
    examples: tuple[str, ...]
    """The kernels that take most of it."""


def origins(text: str) -> dict[str, str]:
    """Kernel name -> the Python frames behind its instruction, innermost first, one text.

    `text` is a compiled program (`Compiled.as_text()`).
    """
    functions = _table(text, "FunctionNames", r'^(\d+) "(.*)"$')
    names = {int(number): name for number, name in functions}
    located = _table(text, "FileLocations", r"^(\d+) \{.*function_name_id=(\d+)")
    location = {int(number): names.get(int(name), "") for number, name in located}
    framed = _table(text, "StackFrames", r"^(\d+) \{file_location_id=(\d+)(.*)\}")
    frames = {int(n): (location.get(int(at), ""), _parent(rest)) for n, at, rest in framed}
    found = {}
    pattern = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*stack_frame_id=(\d+)", re.MULTILINE)
    for instruction, frame in pattern.findall(text):
        found[re.sub(r"[.-]", "_", instruction)] = _chain(frames, int(frame))
    return found


def library_calls(text: str) -> list[str]:
    """The Python frames behind every matrix product of a library, in the order of their launch."""
    found, entry = origins(text), text[text.find("\nENTRY") :]
    pattern = r'^\s+(?:ROOT )?%?([\w.-]+) = .*custom_call_target="__cublas'
    names = re.findall(pattern, entry, re.MULTILINE)
    return [found.get(re.sub(r"[.-]", "_", name), "") for name in names]


def large_copies(text: str, least: int = 2**20) -> dict[str, int]:
    """Bytes of every whole-array copy in a compiled program, by instruction, from `least` bytes on.

    The copy engine makes them, so they are no kernels; a pool that is not updated in place is
    copied this way.
    """
    found = {}
    pattern = r"^\s+(?:ROOT )?%?([\w.-]+) = ([a-z]+)(\d+)?\[([\d,]*)\]\S* (?:copy|copy-start)\("
    for computation in re.split(r"^\}$", text, flags=re.MULTILINE):
        if re.match(r"\s*%?(fused|wrapped)", computation):
            continue
        for name, _, bits, shape in re.findall(pattern, computation, re.MULTILINE):
            elements = math.prod(int(n) for n in shape.split(",") if n)
            size = elements * max(int(bits or 8) // 8, 1)
            if size >= least:
                found[name] = size
    return found


def _table(text: str, title: str, pattern: str) -> list[tuple[str, ...]]:
    """The rows under a title line, up to the next empty line."""
    start = text.find(f"\n{title}\n")
    if start < 0:
        return []
    body = text[start + len(title) + 2 :].split("\n\n", 1)[0]
    return re.findall(pattern, body, re.MULTILINE)


def _parent(rest: str) -> int:
    """XLA prints one more than the number of the parent, 0 for none; so the first has itself."""
    found = re.search(r"parent_frame_id=(\d+)", rest)
    return int(found.group(1)) - 1 if found else 0


def _chain(frames: Mapping[int, tuple[str, int]], frame: int) -> str:
    chain: list[str] = []
    while frame in frames and len(chain) < 64:
        name, frame = frames[frame]
        chain.append(name)
    return " < ".join(chain)


def part(kernel: str, frames: str | None) -> str:
    """The part of the model a kernel belongs to, by the frames behind it, else by its name."""
    if frames is None and LIBRARY.search(kernel):
        return "matrix products of libraries"
    for pattern, name in PARTS:
        if re.search(pattern, kernel if frames is None else frames):
            return name
    return "other"


def shares(
    launched: Sequence[tuple[str, float]],
    steps: int,
    found: Mapping[str, str],
    products: Sequence[str] = (),
) -> list[Share]:
    """The parts of a step, the largest first, from (kernel, milliseconds) of `steps` steps.

    `products` are the frames behind the libraries' matrix products of a step, in order; where
    another number of them was launched, they stay a part of their own.
    """
    library = [i for i, (name, _) in enumerate(launched) if _multiplies(name, found)]
    behind: dict[int, str] = {}
    if len(library) == steps * len(products):
        behind = dict(zip(library, steps * list(products), strict=True))
    spent: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for i, (kernel, ms) in enumerate(launched):
        frames = behind.get(i, found.get(kernel, found.get(kernel.removesuffix("_impl"))))
        spent[part(kernel, frames)][kernel].append(ms)
    rows = []
    for name, kernels in spent.items():
        largest = sorted(kernels, key=lambda kernel: -sum(kernels[kernel]))
        total = sum(map(sum, kernels.values())) / steps
        count = sum(map(len, kernels.values())) / steps
        rows.append(Share(name, total, count, tuple(largest[:3])))
    return sorted(rows, key=lambda row: -row.ms)


def _multiplies(kernel: str, found: Mapping[str, str]) -> bool:
    """Whether it is a library's product itself, not the sum over its parts behind it."""
    known = kernel in found or kernel.removesuffix("_impl") in found
    return not known and bool(LIBRARY.search(kernel)) and "reduce" not in kernel


def longest(
    launched: Iterable[tuple[str, float]], steps: int, most: int = 40
) -> tuple[tuple[str, float, float], ...]:
    """The kernels that take most of a step: (name, milliseconds, how many)."""
    spent: dict[str, list[float]] = defaultdict(list)
    for kernel, ms in launched:
        spent[re.sub(r"(_\d+)+(?=(_impl)?$)", "", kernel)].append(ms)
    rows = [(name, sum(each) / steps, len(each) / steps) for name, each in spent.items()]
    return tuple(sorted(rows, key=lambda row: -row[1])[:most])

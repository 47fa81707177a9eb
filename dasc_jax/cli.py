"""`dasc <program> ...`: one command for the programs of this library.

Each program is a module with `main(argv) -> int | None`, imported only when it is asked for: a
program that lacks an optional package, or sets the environment of JAX, disturbs no other.
"""

import importlib
import sys
from typing import NamedTuple


class Program(NamedTuple):
    """Where the `main` of a program lives, and what `dasc --help` says of it."""

    module: str
    summary: str


PROGRAMS = {
    "serve": Program("dasc_jax.programs.serve", "start the OpenAI-compatible server"),
    "generate": Program("dasc_jax.programs.generate", "continue a prompt without a server"),
    "plan": Program("dasc_jax.analysis.report", "horizons, plan and checkpoint bytes of a model"),
    "demo": Program("dasc_jax.programs.demo", "questions about long documents, cold and cached"),
    "tables": Program("dasc_jax.analysis.tables", "Table 1 and figures 2, 4, 5, 6 of the paper"),
    "quality": Program("dasc_jax.evals.quality.program", "the paper's quality study on the minis"),
    "eval-tasks": Program("dasc_jax.evals.tasks", "end tasks from local files, through a server"),
    "train": Program("dasc_jax.training.train", "train one of the demo checkpoints"),
    "lineage": Program("dasc_jax.analysis.lineage", "drift of a conversation resumed lossily"),
    "convert": Program("dasc_jax.weights.convert", "write a model as an Orbax directory"),
}


def usage() -> str:
    """The text of `dasc --help`: every program with one line."""
    width = max(map(len, PROGRAMS))
    lines = [f"  {name:<{width}}  {program.summary}" for name, program in PROGRAMS.items()]
    return "\n".join(
        [
            "usage: dasc PROGRAM [OPTION ...]",
            "",
            *lines,
            "",
            "dasc PROGRAM --help lists the options of one.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the program that the first argument names with the arguments after it.

    Returns:
        The program's exit status (0 where it returns None); 2 where no program has that name.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in ("-h", "--help"):
        print(usage())
        return 0
    if not arguments or arguments[0] not in PROGRAMS:
        named = f"unknown program {arguments[0]!r}" if arguments else "no program named"
        print(f"dasc: {named}\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(PROGRAMS[arguments[0]].module)
    return module.main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())

"""Bringing together files of lines that several machines or calls measured."""

import shutil
from pathlib import Path

from dasc_jax.evals.quality.cells import Cell, Note, Store


def merge(store: Store, path: Path) -> int:
    """Add the lines of another file that `store` lacks; returns how many.

    The folder beside that file gives its models' folders of tables and figures.

    Raises:
        ValueError: a line of another setting (`Store.require`), or one that is in both files with
            different results.
    """
    other = Store(path)
    cells = {(cell.model, cell.length, cell.task, cell.arm): cell for cell in store.cells}
    fresh: list[Cell | Note] = []
    for cell in other.cells:
        store.require(
            cell.model, cell.length, None if cell.policy == "cold" else cell.rounds,
            weights=cell.weights, dtype=cell.dtype, n=cell.n, generator_seed=cell.generator_seed,
        )  # fmt: skip
        known = cells.get((cell.model, cell.length, cell.task, cell.arm))
        if known is None:
            fresh.append(cell)
        elif known.scores != cell.scores:
            raise ValueError(
                f"{path} has {cell.task} of {cell.model} at {cell.length} tokens under"
                f" {cell.arm} with other scores than {store.path}"
            )
    fresh += _new_notes(store, other)
    store.add(fresh)
    for model in {note.model for note in other.notes}:
        figures = path.with_suffix("") / model
        if figures.is_dir():
            shutil.copytree(figures, store.path.with_suffix("") / model, dirs_exist_ok=True)
    return len(fresh)


def _new_notes(store: Store, other: Store) -> list[Note]:
    """Notes come as whole tables, those of drift and plans one a threshold: all of one or none."""
    known = {_table(note) for note in store.notes}
    values = [note[:3] for note in store.notes]
    for note in other.notes:
        if _table(note) in known and note[:3] not in values:
            raise ValueError(
                f"{other.path} has another {note.kind} of {note.model} than {store.path}"
            )
    return [note for note in other.notes if _table(note) not in known]


def _table(note: Note) -> tuple[str, str, object]:
    return note.kind, note.model, note.values.get("w_max")

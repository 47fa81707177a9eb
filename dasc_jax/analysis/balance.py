"""What each stage of the balanced placement does to the bytes on every rank: numbers and figure."""

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich import box
from rich.table import Table

from dasc_jax.analysis.chart import BLUE, GREEN, INK, MUTED, ORANGE, blank, style
from dasc_jax.balance import storage_schedule
from dasc_jax.config import ModelConfig
from dasc_jax.head_order import head_order
from dasc_jax.layout import Account, account_units
from dasc_jax.plan import SelectionPlan


@dataclasses.dataclass(frozen=True)
class Balance:
    """Accounts of one plan: neither stage, the head order alone, storage alone, and both."""

    w_max: int
    off: Account
    ordered: Account
    storage: Account
    hybrid: Account

    @property
    def stages(self) -> tuple[tuple[str, Account], ...]:
        """The accounts with their names, in the order of tables and figures."""
        return (
            ("off", self.off),
            ("1: head order", self.ordered),
            ("2: storage", self.storage),
            ("1 + 2: hybrid", self.hybrid),
        )


def balancing(config: ModelConfig, plan: SelectionPlan, tp: int) -> Balance:
    """The accounts of `plan` on `tp` ranks, float32; raises as `account` does."""
    order = head_order(plan, config, tp)
    off, storage, hybrid = (
        storage_schedule(plan, tp, "off"),
        storage_schedule(plan, tp, "storage"),
        storage_schedule(plan, tp, "hybrid", order),
    )
    return Balance(
        plan.w_max,
        account_units(config, plan, off.units),
        account_units(config, plan, order.payload),
        account_units(config, plan, storage.units, storage.moved),
        account_units(config, plan, hybrid.units, hybrid.moved),
    )


def balances(config: ModelConfig, plans: Sequence[SelectionPlan], tp: int) -> list[Balance]:
    """`balancing` of every plan worth it: none on one rank, dense ones only among themselves."""
    if tp == 1:
        return []
    lossy = [plan for plan in plans if not plan.exact]
    return [balancing(config, plan, tp) for plan in lossy or plans]


def balance_table(rows: Sequence[Balance], budget: int) -> Table:
    """Four lines for every plan; `budget` in bytes of one rank."""
    ranks = len(rows[0].off.bytes_per_rank)
    result = Table(
        title=f"Before and after each stage of balancing {ranks} ranks",
        caption="bytes/slot, complete, slots: as above. moved: units that cross ranks when a"
        " checkpoint is stored, and go back when it is loaded.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in ("W_max", "stage", "bytes/slot", "complete", "slots", "moved"):
        result.add_column(name, justify="left" if name == "stage" else "right")
    result.add_column("kB on each rank")
    for row in rows:
        for at, (name, account) in enumerate(row.stages):
            result.add_row(
                "" if at else str(row.w_max),
                name,
                f"{account.bytes_per_slot:,}",
                f"{account.c_ckpt:.2f}x",
                f"{account.slots(budget):,}",
                f"{account.moved:,}",
                " ".join(f"{n / 1000:,.0f}" for n in account.bytes_per_rank),
                end_section=at == len(row.stages) - 1,
            )
    return result


def draw_balance(rows: Sequence[Balance], title: str = "") -> Figure:
    """A panel for every plan: the bytes of a checkpoint on every rank, in each placement."""
    ranks = len(rows[0].off.bytes_per_rank)
    columns = min(len(rows), 2)
    lines = -(-len(rows) // columns)
    figure = blank(
        max(5.0, 2.0 + 0.42 * ranks) * columns,
        0.8 + 3.4 * lines,
        f"{title}: checkpoint on each rank",
    )
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, row in zip(panels, rows, strict=False):
        _panel(axes, row)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _panel(axes: Axes, row: Balance) -> None:
    width = 0.2
    for at, ((name, account), colour) in enumerate(
        zip(row.stages, (ORANGE, MUTED, GREEN, BLUE), strict=True)
    ):
        places = [rank + (at - 1.5) * width for rank in range(len(account.bytes_per_rank))]
        axes.bar(places, account.bytes_per_rank, width, color=colour, label=name)
    axes.axhline(row.off.conv_bytes, color=INK, lw=1, ls=(0, (4, 3)), label="convolution windows")
    note = (
        f"W_max {row.w_max}: {row.off.c_ckpt:.2f}x off, {row.hybrid.c_ckpt:.2f}x balanced\n"
        f"units moved: {row.storage.moved:,} storage, {row.hybrid.moved:,} hybrid"
    )
    style(axes, note, "rank", "bytes")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_xticks(range(len(row.off.bytes_per_rank)))


def _short(value: float) -> str:
    return f"{value / 1e6:g} MB" if value >= 1e6 else f"{value / 1e3:g} kB"

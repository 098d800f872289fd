"""`swiftcruise compare`: runs policies on splits with a progress bar, prints the ladder, writes the results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..agents.cells import Cell
from ..agents.compare import Comparison, Result, checked_weights, every_policy, run
from ..agents.output import CELLS, write
from ..agents.summary import HEAD, table
from ..agents.validation import comparison_of, read_document, validate
from ..envs.objectives import OBJECTIVES
from ..runtime.errors import ConfigError

_ROUNDING = 1e-9  # of scores, by which one may be above the bound
_WIDTH = 120  # of the table, where there is no terminal or a narrow one: columns that are cut tell nothing


def compare(
    splits: str, policies: str | None, weights: str | None, seeds: int, horizon: int, jobs: int, out: Path
) -> None:
    """Run a comparison and write it into a folder.

    Args:
        splits: Sources of scenarios, separated by commas.
        policies: Names, separated by commas; None: all that there are.
        weights: Of the objectives, ``throughput=1,energy=0.3``, others 0; None: the usual ones.
        seeds: Episodes a scenario.
        horizon: Decisions in an episode.
        jobs: Processes.
        out: Folder; a comparison that was interrupted goes on from what is there.

    Raises:
        ConfigError: what cannot be compared.
    """
    checked_jobs(jobs)
    names = every_policy() if policies is None else tuple(_words(policies))
    comparison = Comparison(tuple(_words(splits)), names, seeds, horizon, checked_weights(parsed_weights(weights)))
    with _Bar(comparison) as bar:
        result = run(comparison, out / CELLS, jobs=jobs, done=bar.done)
    summary = write(result, out)
    console = Console(width=max(Console().width, _WIDTH))
    for split in comparison.splits:
        console.print(_ladder(result, summary, split))
    console.print(f"{out}: results.json, summary.json, ladder.md, figures, TensorBoard's HParams", highlight=False)
    _warn(console, result, summary)


def check(path: Path, jobs: int) -> int:
    """Run the comparison of a results.json again. Returns the exit code: 1 if anything differs.

    Raises:
        ConfigError: no results.
    """
    checked_jobs(jobs)
    console = Console()
    comparison = comparison_of(read_document(path), path)
    with _Bar(comparison) as bar:
        differences = validate(path, jobs=jobs, done=bar.done)
    for line in differences[:20]:
        console.print(line, highlight=False)
    if differences:
        console.print(f"[red]{path}: {len(differences)} differences[/]", highlight=False)
        return 1
    console.print(f"[green]{path}: every row is as it was[/]", highlight=False)
    return 0


def parsed_weights(text: str | None) -> Mapping[str, float] | None:
    """Weights from ``throughput=1,energy=0.3``.

    Raises:
        ConfigError: not of that form.
    """
    if text is None:
        return None
    weights = {}
    for word in _words(text):
        name, equals, value = word.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"weights={text!r}: write {'=1,'.join(OBJECTIVES)}=1, or some of these")
    return weights


def checked_jobs(jobs: int) -> int:
    """Raises `ConfigError` below 1."""
    if jobs < 1:
        raise ConfigError(f"jobs={jobs} must be at least 1")
    return jobs


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


class _Bar:
    """A progress bar over the cells of a comparison."""

    def __init__(self, comparison: Comparison) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
        self._task = self._progress.add_task("comparing", total=len(set(comparison.cells())))

    def done(self, cell: Cell) -> None:
        self._progress.update(self._task, advance=1, description=cell.label)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def _ladder(result: Result, summary: Mapping[str, Any], split: str) -> Table:
    shown = Table(title=split, title_justify="left")
    for name in HEAD:
        intervals = name in (HEAD[2], HEAD[3])  # long, and may be broken
        shown.add_column(name, justify="left" if name == HEAD[0] else "right", no_wrap=not intervals)
    for row in table(summary, result.comparison.policies, split):
        shown.add_row(*row)
    return shown


def _warn(console: Console, result: Result, summary: Mapping[str, Any]) -> None:
    """Say what should not be: policies that failed, and scores above the bound."""
    for name, value in summary.items():
        if name.endswith("/policy_failures") and value:
            console.print(f"[yellow]{name}: {value} decisions raised an error; the last controls were held[/]")
    above = [row for row in result.rows() if row["score"] > 1.0 + _ROUNDING]
    if above:
        worst = max(above, key=lambda row: row["score"])
        console.print(
            f"[red]{len(above)} episodes score above the oracle, which is then no bound: {worst['policy']} on "
            f"{worst['scenario']} has {worst['score']:.6f}[/]",
            highlight=False,
        )

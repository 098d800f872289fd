"""What a comparison leaves in its folder: rows, summary, tables, figures, and TensorBoard's HParams."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .compare import Result
from .figures import draw_all
from .summary import Summary, markdown, summarise

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELLS = "cells"  #: folder of what an interrupted comparison goes on from

#: Figures of the summary that HParams lists.
_METRICS = ("score_iqm", "optimality_gap", "throughput_ratio_to_best_static", "violated_interval_share", "ooms")


def write(result: Result, folder: Path) -> Summary:
    """Write everything; files of an earlier comparison are replaced. Returns the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    summary = summarise(result)
    (folder / "results.json").write_text(_document(result), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "ladder.md").write_text(markdown(result, summary), encoding="utf-8")
    figures = draw_all(result, summary, folder)
    _write_tensorboard(result, summary, figures, folder / "tensorboard")
    return summary


def _document(result: Result) -> str:
    """As JSON, with a line for each row."""
    document = result.document()
    lists = {name: document.pop(name) for name in ("rows", "front")}
    head = json.dumps(document, indent=1, allow_nan=False).removesuffix("\n}")
    parts = [
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in rows) + "\n ]"
        for name, rows in lists.items()
    ]
    return f"{head},\n" + ",\n".join(parts) + "\n}\n"


def _write_tensorboard(result: Result, summary: Mapping[str, Any], figures: Mapping[str, Figure], folder: Path) -> None:
    """A run of HParams for each policy and split, and the figures."""
    from torch.utils.tensorboard.writer import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for split in result.comparison.splits:
            for policy in result.comparison.policies:
                name = f"{policy}/{split}"
                metrics = {f"compare/{m}": v for m in _METRICS if (v := summary.get(f"{name}/{m}")) is not None}
                writer.add_hparams({"policy": policy, "split": split}, metrics, run_name=name.replace("/", "_"))
        for name, figure in figures.items():
            writer.add_figure(f"compare/{name}", figure)

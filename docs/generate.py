"""Writes the tables in docs/*.md and in docstrings that follow from the code; `--check` only says whether they do.

In a page a table stands between `<!-- NAME -->` and `<!-- /NAME -->`, in a docstring between `.. NAME, written by
docs/generate.py` and `.. end of NAME`; what is between them is replaced.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from swiftcruise.envs import objectives
from swiftcruise.envs.plants import assembly, heat, interval, memory_belief
from swiftcruise.envs.plants.profile import load_framework, load_hardware, profile_names
from swiftcruise.envs.scenarios import drawing
from swiftcruise.envs.scenarios.disturbances import KINDS
from swiftcruise.envs.scenarios.limits import limited_by
from swiftcruise.envs.scenarios.splits import SPLITS, manifest
from swiftcruise.envs.scenarios.workloads import DATASETS
from swiftcruise.envs.simulation import ACTED_ON
from swiftcruise.envs.training_env import reward_space
from swiftcruise.runtime.codec import ObservationCodec
from swiftcruise.runtime.config import settings_table
from swiftcruise.runtime.controls import ControlLimits

DOCS = Path(__file__).resolve().parent

LIMITS = ("memory", "launch", "compute", "data", "cores", "heat")
POPULATIONS = (drawing.COMMON, drawing.UNKNOWN, drawing.HARD)
POPULATION_NAMES = ("train, val, test-id", "test-ood", "test-hard")


def markdown(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def simple(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table in reStructuredText's simple form, indented as a class docstring."""
    lines = [[str(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = "  ".join("=" * width for width in widths)
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(f"    {text}" for text in (rule, texts[0], rule, *texts[1:], rule))


def number(value: float, scale: str = "linear") -> str:
    """A bound, as a power of two where it is one and the scale is logarithmic."""
    exponent = math.log2(value) if value > 0.0 else 0.0
    return f"2^{exponent:.0f}" if scale == "log2" and exponent and exponent.is_integer() else f"{value:g}"


ACTION_HEAD = ("index", "control", "meaning", "unit", "at -1", "at 1", "scale")


def action_rows() -> list[list[str]]:
    """What an environment's action sets; limits that a device or host decides are named."""
    entries = {entry.name: entry for entry in ObservationCodec().table()}
    own = {"power_limit_w": ("least_power_w", "power_w"), "num_workers": ("0", "16, or host.cores")}
    rows = []
    for i, name in enumerate(ACTED_ON):
        limit, entry = getattr(ControlLimits(), name), entries[name]
        scale = "log2" if limit.multiplicative else "linear"
        low, high = own.get(name) or (number(limit.low, scale), number(limit.high, scale))
        meaning = entry.meaning.removesuffix(" in force")
        rows.append([str(i), name, meaning, entry.unit, low, high, f"{scale}, whole" if limit.integer else scale])
    return rows


OBSERVATION_HEAD = ("index", "name", "meaning", "unit", "range", "scale")


def observation_rows(flagged: bool) -> list[list[str]]:
    """A frame's entries; or, `flagged`, its flags and objective weights."""
    rows = []
    for entry in ObservationCodec(weights=len(objectives.OBJECTIVES)).table():
        if (entry.scale in ("flag", "weight")) is not flagged:
            continue
        name, meaning = entry.name, entry.meaning
        if entry.scale == "flag":
            meaning = "1: it was measured, 0: not"
        elif entry.scale == "weight":
            meaning = f"weight of {objectives.OBJECTIVES[int(name.removeprefix('weight_'))]}"
        bounds = f"{number(entry.low, entry.scale)} .. {number(entry.high, entry.scale)}"
        rows.append([str(entry.index), name, meaning, entry.unit, bounds, entry.scale])
    return rows


REWARD_HEAD = ("index", "objective", "0 is", "least", "weight unless given")


def reward_rows() -> list[list[str]]:
    """The reward vector."""
    at_zero = {
        "throughput": "the reference's real tokens a second",
        "energy": "the reference's energy a real token",
        "safety": "no limit broken",
        "cost": "the reference's price of a real token",
    }
    return [
        [str(i), name, at_zero[name], f"{low:g}", f"{weight:g}"]
        for i, (name, low, weight) in enumerate(
            zip(objectives.OBJECTIVES, reward_space().low, objectives.DEFAULT_WEIGHTS, strict=True)
        )
    ]


def code(rows: Iterable[list[str]], *columns: int) -> list[list[str]]:
    """Rows with some columns set as code."""
    return [[f"`{cell}`" if i in columns else cell for i, cell in enumerate(row)] for row in rows]


def observation_docstring() -> str:
    """Both halves of a frame, each as wide as it needs to be."""
    return "\n\n".join(simple(OBSERVATION_HEAD, observation_rows(flagged)) for flagged in (False, True))


def devices_table() -> str:
    """Constants of the devices, each with how it is known."""
    profiles = [load_hardware(name) for name in profile_names("hardware")]
    rows = []
    for name, field in type(profiles[0]).model_fields.items():
        if name in profiles[0].constants():
            entries = [getattr(profile, name) for profile in profiles]
            cells = [f"{entry.value:.4g} {entry.basis[0]}" for entry in entries]
            rows.append([f"`{name}`", *cells, field.description])
    return markdown(["constant", *(profile.name for profile in profiles), "meaning"], rows)


def framework_table() -> str:
    """Constants of training with transformers, whatever the device and the model."""
    constants = load_framework().constants()
    return markdown(
        ["constant", "value", "basis", "source"],
        ([f"`{name}`", f"{entry.value:.4g}", entry.basis, entry.source] for name, entry in constants.items()),
    )


def interval_table() -> str:
    """Constants of a control interval, which no profile holds."""
    rows: list[tuple[str, float, str, str]] = [
        ("MARGIN", memory_belief._MARGIN, "margin on the run's memory model", "as in `runtime.memory_model`"),
        ("MODEL_LEARNS", interval._MODEL_LEARNS, "share of its error that an interval removes", "assumed"),
        ("MODEL_NOISE", interval._MODEL_NOISE, "standard deviation of the noise in what it learns", "assumed"),
        ("MOST_CAUTION", memory_belief.MOST_CAUTION, "greatest `caution` after out-of-memory events", "assumed"),
        (
            "CAUTION_FADES",
            memory_belief.CAUTION_FADES,
            "its logarithmic decay, a micro-batch",
            "as in `runtime.memory_model`",
        ),
        ("USUAL_GROWTH", interval._USUAL_GROWTH, "share of the way that fragmentation goes in an interval", "assumed"),
        ("CHANGE_GROWTH", interval._CHANGE_GROWTH, "the same for an octave of change of the budget", "assumed"),
        ("RETUNED", interval._RETUNED, "octaves of budget that need no retuning", "assumed"),
        ("RETUNE_S", assembly.RETUNE_S, "seconds to run with new shapes, an octave, at most once", "assumed"),
        ("RESPAWN_S", assembly.RESPAWN_S, "seconds to start loader workers", "assumed"),
        ("FLUSH_S", assembly.FLUSH_S, "seconds to give back the allocator's blocks", "assumed"),
        ("SMOOTH", interval._SMOOTH, "width of the corner between computing and loading", "assumed"),
        (
            "THROTTLING_COST",
            heat._THROTTLING_COST,
            "further time where heat takes all dynamic power away, relative",
            "assumed",
        ),
        (
            "TIME_NOISE",
            interval.TIME_NOISE,
            "of a step's time, relative",
            "measured: ms-swift's tables repeat within 0.4 %",
        ),
        (
            "POWER_SIGMA",
            interval._POWER_SIGMA,
            "of the power sensor, relative",
            "measured: Zeus's traces at 2 s, 2-3 %",
        ),
        ("MEMORY_CAP", interval.MEMORY_CAP, "memory of all processes that the run plans for", "as in the guard"),
        ("MEMORY_ALARM", interval.MEMORY_ALARM, "memory of all processes that breaks the limit", "set"),
        ("PACE_SLACK", interval._PACE_SLACK, "share of an energy budget that may be ahead of time", "set"),
        ("DEVICE_PRICE", assembly.DEVICE_PRICE, "price of 1e15 FLOP/s (peak) for an hour", "assumed"),
        ("CORE_PRICE", assembly.CORE_PRICE, "price of a core for an hour", "assumed"),
        ("ENERGY_PRICE", assembly.ENERGY_PRICE, "price of a kWh", "assumed"),
    ]
    return markdown(
        ["constant", "value", "meaning", "basis"],
        ([f"`{name}`", f"{value:.4g}", meaning, basis] for name, value, meaning, basis in rows),
    )


def splits_table() -> str:
    """The frozen splits, and how many of their scenarios are limited by what."""
    rows = []
    for name in SPLITS:
        split = manifest(name)
        found = Counter(limit for scenario in split.scenarios for limit in limited_by(scenario))
        counts = [found[limit] for limit in LIMITS]
        rows.append([f"`{name}`", len(split.scenarios), split.description, f"`{split.sha256[:12]}`", *counts])
    return markdown(["split", "scenarios", "what", "SHA-256", *LIMITS], rows)


def held_out_table() -> str:
    """What train, val and test-id never hold."""
    return markdown(["kind", "held out"], ([kind, ", ".join(names)] for kind, names in drawing.HELD_OUT.items()))


def same_in_all(texts: list[str]) -> list[str]:
    """Cells of a row; one that repeats the first is a ditto mark."""
    return [text if not i or text != texts[0] else '"' for i, text in enumerate(texts)]


def disturbances_table() -> str:
    """How often each kind of disturbance occurs, and the distributions of its parameters."""
    rows = []
    for kind in (name.replace("_", "-") for name in KINDS):
        chances = [p.chances.get(kind, 0.0) for p in POPULATIONS]
        rows.append([f"**{kind}**", *(f"{chance:.0%}" if chance else "never" for chance in chances)])
        for field in drawing.HARD.disturbances[kind]:
            texts = [str(p.disturbances[kind][field]) if kind in p.chances else "" for p in POPULATIONS]
            rows.append([f"`{field}`", *same_in_all(texts)])
    return markdown(["kind, parameter", *POPULATION_NAMES], rows)


def drawn_table() -> str:
    """Distributions of everything but disturbances."""

    def row(field: str, values: Iterable[Any]) -> list[str]:
        return [f"`{field}`", *same_in_all([str(value) for value in values])]

    def part(name: str) -> list[list[str]]:
        fields = getattr(drawing.COMMON, name)
        return [row(f"{name}.{field}", (getattr(p, name)[field] for p in POPULATIONS)) for field in fields]

    def alike(field: str, value: Any) -> list[str]:
        return row(field, [value] * len(POPULATIONS))

    rows = [
        row("hardware", (p.hardware for p in POPULATIONS)),
        row("workload.model", (p.models for p in POPULATIONS)),
        row("workload.data", (p.data for p in POPULATIONS)),
        alike("workload.tuner", f"below 3 B parameters {drawing.SMALL_TUNER}; else {drawing.LARGE_TUNER}"),
        alike("workload.quantization", f"{drawing.QUANTIZATION}; above 30 B parameters {drawing.HUGE_QUANTIZATION}"),
        alike("workload.lora_rank", drawing.LORA_RANK),
        alike("workload.lora_targets", drawing.LORA_TARGETS),
        alike("workload.flash_attention", drawing.FLASH_ATTENTION),
        alike("workload.ranks", drawing.RANKS),
        alike("workload.batch", f"ranks x ({drawing.SAMPLES})"),
        alike("host.network_gbps", drawing.NETWORK_GBPS),
        row("host.cores", (p.cores for p in POPULATIONS)),
        row("host.ambient_c", (p.ambient_c for p in POPULATIONS)),
        ["no disturbances", *(f"{p.steady:.0%}" if p.steady else "never" for p in POPULATIONS)],
        *part("preview"),
        *part("mismatch"),
        row("budgets", (p.budget for p in POPULATIONS)),
        row("budgets.energy", (p.energy for p in POPULATIONS)),
        row("budgets.temperature_c", (f"throttling - {p.below_throttling}" for p in POPULATIONS)),
        row("dead_time", (p.dead_time for p in POPULATIONS)),
        row("noise", (p.noise for p in POPULATIONS)),
        row("dropout", (p.dropout for p in POPULATIONS)),
        alike("interval_s", "30, 60, 120 or 300: the shortest that holds two optimizer steps"),
    ]
    return markdown(["field", *POPULATION_NAMES], rows)


def data_table() -> str:
    """The kinds of data, their lengths, and what a sample costs to prepare."""
    rows = []
    for name, data in DATASETS.items():
        lengths = data.lengths()
        median, p95 = (f"{float(lengths.quantile(share)):.0f}" for share in (0.5, 0.95))
        longest = ", ".join(f"{value:g}" for value in drawing.MAX_LENGTHS[name].values)
        milliseconds = f"{1000 * data.preparation_s:g} ms"
        cells = [f"`{name}`", data.description, f"{lengths.mean:.0f}", median, p95, longest, milliseconds, data.source]
        rows.append(cells)
    return markdown(["data", "what", "mean", "median", "95 %", "`max_length`", "CPU time", "source"], rows)


#: File, name of the block in it, and what writes the block.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("configuration.md", "settings", settings_table),
    ("scenarios.md", "splits", splits_table),
    ("scenarios.md", "held-out", held_out_table),
    ("scenarios.md", "disturbances", disturbances_table),
    ("scenarios.md", "drawn", drawn_table),
    ("scenarios.md", "data", data_table),
    ("environment.md", "actions", lambda: markdown(ACTION_HEAD, code(action_rows(), 1, 4, 5))),
    ("environment.md", "observations", lambda: markdown(OBSERVATION_HEAD, code(observation_rows(False), 1))),
    ("environment.md", "flags", lambda: markdown(OBSERVATION_HEAD, code(observation_rows(True), 1))),
    ("environment.md", "rewards", lambda: markdown(REWARD_HEAD, code(reward_rows(), 1))),
    ("environment.md", "interval", interval_table),
    ("environment.md", "framework", framework_table),
    ("environment.md", "devices", devices_table),
    ("../envs/training_env.py", "actions", lambda: simple(ACTION_HEAD, action_rows())),
    ("../envs/training_env.py", "observations", observation_docstring),
    ("../envs/training_env.py", "rewards", lambda: simple(REWARD_HEAD, reward_rows())),
]


#: What stands before and after a table, by the kind of file.
MARKERS = {
    ".md": ("<!-- {name} -->\n", "\n<!-- /{name} -->"),
    ".py": ("    .. {name}, written by docs/generate.py\n\n", "\n\n    .. end of {name}"),
}


def fill(text: str, name: str, table: str, kind: str) -> str:
    """`text` of a file of some kind (".md", ".py") with `table` in place of the block `name`."""
    begin, end = (marker.format(name=name) for marker in MARKERS[kind])
    block = re.compile(rf"({re.escape(begin)}).*?({re.escape(end)}\n)", re.DOTALL)
    filled, count = block.subn(lambda match: f"{match[1]}{table}{match[2]}", text)
    if count != 1:
        raise SystemExit(f"expected one block {begin.strip()!r} ... {end.strip()!r}, found {count}")
    return filled


def main() -> int:
    """Write the tables, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is out of date")
    check = parser.parse_args().check
    stale = False
    for file, name, table in TABLES:
        path = DOCS / file
        old = path.read_text(encoding="utf-8")
        new = fill(old, name, table(), path.suffix)
        if new == old:
            continue
        stale = True
        shown = path.resolve().relative_to(DOCS.parent)
        print(f"{shown}: {name} {'is out of date; run make docs' if check else 'written'}")
        if not check:
            path.write_text(new, encoding="utf-8")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())

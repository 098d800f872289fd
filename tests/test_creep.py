"""Memory that grows at equal micro-batches is reported, once; longer sequences are not taken for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftcruise.runtime.creep import CreepAlarm

from .small_trainer import rows_of
from .test_live import LENGTHS, begin, make_run


def test_growth_beyond_doubt_is_said_once_with_what_it_leads_to():
    alarm = CreepAlarm()
    said = [alarm.check(0.02, 0.001, 0.10, 4.0) for _ in range(10)]
    assert [line for line in said if line] == [
        "memory grows by 2.0% of capacity per 1000 micro-batches of equal size: a leak or fragmentation; in about "
        "1,250 optimizer steps the cap is reached, and micro-batches get smaller"
    ]


@given(
    st.lists(st.tuples(st.floats(-1, 1) | st.just(float("nan")), st.floats(0, 1) | st.just(float("nan"))), max_size=20)
)
def test_growth_that_is_slight_or_in_doubt_is_not_reported(intervals: list[tuple[float, float]]):
    alarm = CreepAlarm()
    for creep, error in intervals:
        if not (creep >= 0.005 and creep > 4 * error):
            assert alarm.check(creep, error, 0.5, 4.0) is None


@pytest.mark.parametrize("leak", [True, False])
def test_a_leak_in_a_run_is_told_apart_from_sequences_that_get_longer(
    tmp_path: Path, leak: bool, capfd: pytest.CaptureFixture[str]
):
    run = make_run(tmp_path, memory_limit_gib=0.002, checkpoint="keep")
    begin(run)
    swift: Any = run.swift
    kept: list[torch.Tensor] = []
    forward = swift.model.forward

    def leaking_forward(ids: torch.Tensor) -> torch.Tensor:
        if leak:
            kept.append(torch.ones(600, requires_grad=True).exp())  # its graph, and what that saved, stays
        return forward(ids)

    swift.model.forward = leaking_forward
    for step in range(1, 41):
        macro = rows_of([n + step // 2 for n in LENGTHS], 2)
        run.runner.run(swift.model, [(macro, swift.count_items(run.runner.prepare(macro)))])
        run.end_step(step, 0.1)
    run.end(40)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"memory_creep"' in line and '"event"' in line]
    assert len([event for event in events if event["kind"] == "event"]) == leak
    assert ("a leak or fragmentation" in capfd.readouterr().err) == leak

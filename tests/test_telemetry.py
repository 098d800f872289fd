"""Telemetry and controls as matrices, and what a live run measures of the job."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from swiftcruise.runtime.controls import CONTROL_FIELDS, Controls
from swiftcruise.runtime.telemetry import TELEMETRY_FIELDS, Telemetry

from .test_live import Proposing, make_run, train

both = pytest.mark.parametrize(("kind", "names"), [(Telemetry, TELEMETRY_FIELDS), (Controls, CONTROL_FIELDS)])


@both
def test_a_matrix_has_a_row_a_plant_and_a_column_a_field(kind, names):
    matrix = np.arange(3.0 * len(names)).reshape(3, -1)
    of_rows = kind.from_rows(matrix)
    assert all(np.array_equal(getattr(of_rows, name), matrix[:, i]) for i, name in enumerate(names))
    assert np.array_equal(of_rows.rows(), matrix)
    assert of_rows.rows().flags.c_contiguous
    assert of_rows.n == 3
    assert kind.from_rows(np.empty((0, len(names)))).rows().shape == (0, len(names))


@both
def test_fields_are_views_of_the_matrix_and_rows_are_not_views_of_the_fields(kind, names):
    matrix = np.zeros((2, len(names)))
    of_rows = kind.from_rows(matrix)
    matrix[1, 0] = 7.0
    assert getattr(of_rows, names[0]).tolist() == [0.0, 7.0]
    of_rows.rows()[0, 0] = 9.0
    assert matrix[0, 0] == 0.0


@both
def test_a_matrix_of_another_shape_is_refused(kind, names):
    for shape in ((len(names),), (2, len(names) - 1)):
        with pytest.raises(ValueError, match=str(len(names))):
            kind.from_rows(np.zeros(shape))


@pytest.mark.parametrize(("max_steps", "expected"), [(4, [0.0, 0.25, 0.5, 0.75]), (0, [np.nan] * 4)])
def test_a_live_run_knows_how_much_of_the_job_is_done_if_its_length_is_known(tmp_path: Path, max_steps, expected):
    run = make_run(tmp_path)
    args = SimpleNamespace(device=torch.device("cpu"), logging_dir=str(tmp_path))
    run.begin(args, SimpleNamespace(global_step=0, is_world_process_zero=True, max_steps=max_steps), None)
    train(run, 3)
    seen = [(row["job_progress"], row["energy_budget_used"], row["temperature_limit_c"]) for row in Proposing.seen]
    run.end(3)
    assert np.array_equal(seen, [(progress, np.nan, np.nan) for progress in expected], equal_nan=True)

"""Golden trajectories: the simulated plant does today what it did when its figures were published.

A change of the plant, of a profile or of a scenario shows here first. If it was meant, write the file anew and say in
the change why the numbers moved:

    python -m tests.test_golden --write
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from swiftcruise.envs.plants.simulated import SimulatedPlant
from swiftcruise.envs.scenarios.splits import load_scenarios
from swiftcruise.runtime.controls import Controls

FILE = Path(__file__).parent / "golden" / "trajectories.json"
SCENARIOS = ("val-000", "test-id-017", "test-ood-003", "test-ood-050", "test-hard-002", "test-hard-040")
FIELDS = (
    "tokens_per_s", "data_wait_fraction", "memory_peak_fraction", "memory_device_fraction", "oom_count", "power_w",
    "temperature_c", "checkpoint_fraction", "upcoming_max", "fit_tokens_checkpointed",
)  # fmt: skip
INTERVALS = 12


def trajectory(name: str) -> dict[str, list[float | None]]:
    """Some telemetry of a scenario under a fixed course of controls, by field; None = not measured."""
    plant = SimulatedPlant(load_scenarios(name))
    telemetry = [plant.reset()]
    for i in range(INTERVALS - 1):
        controls = Controls.of(
            token_budget=2.0 ** (11 + i % 5),
            memory_target=0.5 + 0.05 * (i % 8),
            num_workers=1 + i % 3,
            power_limit_w=120 + 30 * (i % 7),
        )
        telemetry.append(plant.step(controls))
    values = {field: [float(getattr(each, field)[0]) for each in telemetry] for field in FIELDS}
    return {field: [None if np.isnan(v) else v for v in column] for field, column in values.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_plant_does_what_it_did(name):
    golden = json.loads(FILE.read_text())[name]
    now = trajectory(name)
    differences = [
        f"{field} in interval {i}: was {was}, is {value}"
        for field, column in golden.items()
        for i, (was, value) in enumerate(zip(column, now[field], strict=True))
        if (was is None) != (value is None) or (was is not None and value != pytest.approx(was, rel=1e-9, abs=1e-12))
    ]
    assert not differences, (
        f"scenario {name} changed in {len(differences)} values: {'; '.join(differences[:3])}. If this was meant: "
        "python -m tests.test_golden --write"
    )


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    FILE.parent.mkdir(exist_ok=True)
    text = (
        json.dumps({name: trajectory(name) for name in SCENARIOS}, indent=0).replace("\n", " ").replace("], ", "],\n")
    )
    FILE.write_text(text + "\n")

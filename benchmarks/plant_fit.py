"""Fits the plant's constants to measured rows, by least squares. Used by plant_fidelity.py; deterministic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from plant_rows import (
    TABLES,
    Constants,
    Row,
    predict_memory_gib,
    predict_minutes,
    predict_seconds,
)

from swiftcruise.envs.plants.profile import load_model

GPU = "a100-80g"
#: Models of one tokenizer share a scale.
TOKENIZERS = {
    "scale_yi": ("yi-6b", "yi-34b"),
    "scale_chatglm": ("chatglm3-6b",),
    "scale_baichuan": ("baichuan2-7b", "baichuan2-13b"),
    "scale_zephyr": ("zephyr-7b",),
}
#: What the fit of times moves, with first guesses (orders of magnitude, from counting passes and kernels).
SPEED = {
    "attention_efficiency": 0.5, "elementwise_traffic": 60.0, "adapter_traffic": 80.0, "gradient_traffic": 12.0,
    "masked_traffic": 17.0, "alibi_traffic": 44.0, "eager_traffic": 48.0,
    "gptq4_traffic": 76.0, "gptq8_traffic": 85.0, "bnb4_traffic": 50.0,
    "launch_seconds_qwen": 3.6e-3, "launch_seconds_llama": 5.5e-3, "launch_seconds_other": 4.5e-3,
    "adapter_launch_seconds": 0.23e-3, "quantized_launch_seconds": 1.5e-3, "zero_launch_seconds": 7e-3,
    "short_share": 0.15, "short_longest": 575.0, "first_mean": 3450.0, "first_deviation": 2500.0,
    "run_seconds": 16.0, "run_seconds_billion": 0.4,
    "scale_yi": 1.13, "scale_chatglm": 1.0, "scale_baichuan": 1.13, "scale_zephyr": 1.9,
}  # fmt: skip
#: The same for memory.
MEMORY = {
    "bnb4_load_bytes": 0.7, "stored_bytes": 4.0, "layer_bytes": 7.0, "logits_bytes": 12.0, "logits_bytes_llama": 24.0,
    "eager_bytes": 11.5, "masked_bytes": 10.0, "alibi_bytes": 12.0, "step_bytes": 2.4, "zero_step_bytes": 6.0,
    "adapter_state_bytes": 20.0, "head_state_bytes": 10.0, "fragmentation": 3.6, "first_fragmentation": 2.4,
    "device_context_gib": 2.0, "qwen_quantized_logits": 0.75, "december_pool": 0.4,
}  # fmt: skip


def current(constants: Constants, names: Sequence[str]) -> np.ndarray:
    """Values of the named constants."""
    known = {**constants.device(GPU).values(), **constants.framework.values(), **constants.tables}
    for name, models in TOKENIZERS.items():
        known[name] = constants.scales.get(models[0], load_model(models[0]).tokens_scale.value)
    return np.array([known[name] for name in names])


def with_values(constants: Constants, names: Sequence[str], values: Sequence[float]) -> Constants:
    """The constants with new values for the named ones."""
    given = dict(zip(names, map(float, values), strict=True))
    hardware = constants.device(GPU)
    framework = constants.framework
    source = "refitted"
    own = {name: given[name] for name in given if name in framework.constants()}
    device = {name: given[name] for name in given if name in hardware.constants()}
    scales = {model: given[name] for name, models in TOKENIZERS.items() if name in given for model in models}
    return replace(
        constants,
        framework=framework.replace(own, source),
        hardware={**constants.hardware, GPU: hardware.replace(device, source)},
        scales={**constants.scales, **scales},
        tables={**constants.tables, **{name: given[name] for name in given if name in TABLES}},
    )


def guessed(constants: Constants) -> Constants:
    """The constants with the first guesses for all that is fitted."""
    guesses = SPEED | MEMORY
    return with_values(constants, list(guesses), list(guesses.values()))


def speed_error(row: Row, constants: Constants) -> float | None:
    """Log of predicted over measured time; None if the row has none."""
    if row.run_minutes is not None:
        return float(np.log(predict_minutes(row, constants) / row.run_minutes))
    if row.samples_per_s is not None:
        return float(np.log(predict_seconds(row, constants) * row.samples_per_s))
    return None


def memory_error(row: Row, constants: Constants) -> float | None:
    """Log of predicted over measured memory; None if the row has none."""
    if row.memory_gib is None:
        return None
    return float(np.log(predict_memory_gib(row, constants) / row.memory_gib))


def fit(rows: Sequence[Row], constants: Constants, what: str) -> Constants:
    """Constants fitted to rows, `what` = "speed" or "memory".

    Robust (soft L1) least squares of the log errors over the logs of the constants, with a weak pull towards the
    first guesses (a constant that is off by a factor of e costs as much as one row that is off by 5 %), which decides
    only what the rows leave open. Starts from the constants given.
    """
    from scipy.optimize import least_squares

    guesses = SPEED if what == "speed" else MEMORY
    names = list(guesses)
    error = speed_error if what == "speed" else memory_error
    measured = [row for row in rows if error(row, constants) is not None]
    guess = np.log(list(guesses.values()))

    def residuals(x: np.ndarray) -> np.ndarray:
        tried = with_values(constants, names, np.exp(x))
        return np.array([*(error(row, tried) for row in measured), *(0.05 * (x - guess))])

    found = least_squares(
        residuals, np.log(current(constants, names)), bounds=(guess - 1.0, guess + 0.65), loss="soft_l1",
        f_scale=0.03, x_scale=0.1, diff_step=1e-4, ftol=1e-4, xtol=1e-4, max_nfev=60,
    )  # fmt: skip
    return with_values(constants, names, np.exp(found.x))

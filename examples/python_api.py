"""ms-swift started from Python, under control: a complete training of a tiny model, offline, on any machine.

python examples/python_api.py
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

from swift import sft_main
from swift.callbacks import callbacks_map

from swiftcruise.cli.tiny import SHORT, build_model, write_data
from swiftcruise.runtime.config import CruiseConfig
from swiftcruise.runtime.hook import CruiseCallback


def main(folder: Path) -> None:
    """Train, and print what the run did."""
    model = build_model(folder / "model")
    data = write_data(folder / "data.jsonl", model, SHORT.sample(160))

    # With CruiseCallback alone, without `partial`, the configuration is the file that SWIFTCRUISE_CONFIG names.
    config = CruiseConfig(policy="cruise", interval_steps=2, memory_cap=0.85)
    callbacks_map["swiftcruise"] = partial(CruiseCallback, config=config)

    arguments = ["--model", model, "--model_type", "qwen3", "--template", "qwen3", "--check_model", "false"]
    arguments += ["--dataset", data, "--num_train_epochs", "1", "--tuner_type", "full"]
    arguments += ["--output_dir", folder / "out", "--add_version", "false"]
    sft_main([str(argument) for argument in arguments] + ["--callbacks", "swiftcruise"])

    summary = json.loads((folder / "out" / "swiftcruise_summary.json").read_text(encoding="utf-8"))
    print(f"{summary['samples']} samples, {summary['tokens_per_s']:,.0f} tokens/s, {summary['changes']} changes")


if __name__ == "__main__":  # loader workers may import this file again
    with tempfile.TemporaryDirectory() as directory:
        main(Path(directory))

"""`swiftcruise run`: the configuration from options and file, then the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..runtime.config import CruiseConfig, load_config, merge, parse_assignment


def gather_config(path: str | None, settings: Sequence[str], given: Mapping[str, Any]) -> CruiseConfig:
    """The configuration that a command line asks for.

    Args:
        path: `--config`.
        settings: every `--set key=value`, a later one winning over an earlier.
        given: options with a name of their own, which win over `--set`; None = not given.
    """
    overrides: dict[str, Any] = {}
    for text in settings:
        overrides = merge(overrides, parse_assignment(text))
    named = {key: value for key, value in given.items() if value is not None}
    return load_config(path, overrides=merge(overrides, named))


def run_training(command: Sequence[str], path: str | None, settings: Sequence[str], given: Mapping[str, Any]) -> int:
    """Run an ms-swift command under control; its exit code."""
    from ..runtime import launcher, versions
    from ..runtime.policy import make_policy

    config = gather_config(path, settings, given)
    versions.check_versions()
    if not config.observe:
        # A policy that cannot be made is better refused now than after the model was loaded.
        make_policy(config.policy, None, **config.policy_options)
    return launcher.run(command, config)

"""The policy contract and the registry of policies by name."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from .controls import Controls
from .errors import ConfigError, UnknownPolicy
from .policy_file import is_policy_file, read_policy_file
from .telemetry import Telemetry

#: A policy's state: JSON-serialisable, so that a checkpoint carries it without executing code on load.
State = dict[str, Any]


@runtime_checkable
class Policy(Protocol):
    """Telemetry in, controls out, for n plants at once.

    A policy decides from telemetry alone (never from the plant), so that it decides the same in simulation, in
    replay and in a live run. Unset (NaN) controls are left as they are. A policy may also offer `explain() -> str`:
    its words for the first plant's decision, shown on the console.
    """

    def reset(self, n: int, seed: int | None = None) -> None:
        """Forget everything and prepare for ``n`` plants."""
        ...

    def act(self, telemetry: Telemetry) -> Controls:
        """Controls for the next interval."""
        ...

    def state_dict(self) -> State:
        """All that `act` remembers, as JSON-serialisable values."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continue from `state_dict()`'s state."""
        ...

    def diagnostics(self) -> Mapping[str, Any]:
        """Named arrays of shape ``(n,)`` worth a chart (P, I, D terms, setpoints, errors); may be empty."""
        ...


#: Built-in policies by name: "module:attribute", imported when asked for.
REGISTRY: dict[str, str | Callable[..., Policy]] = {
    "static": "swiftcruise.baselines.static:StaticPolicy",
    "default": "swiftcruise.baselines.simple:DefaultPolicy",
    "rule": "swiftcruise.baselines.simple:RulePolicy",
    "aimd": "swiftcruise.baselines.aimd:AIMDPolicy",
    "extremum-seeking": "swiftcruise.baselines.extremum:ExtremumSeekingPolicy",
    "mpc": "swiftcruise.baselines.mpc:MPCPolicy",
    "pid": "swiftcruise.baselines.pid_policies:UtilizationPID",
    "pid-memory": "swiftcruise.baselines.pid_policies:MemoryPID",
    "pid-thermal": "swiftcruise.baselines.power_loops:ThermalPID",
    "pid-power": "swiftcruise.baselines.power_loops:PowerPID",
    "multi-loop": "swiftcruise.baselines.multi_loop:MultiLoopPID",
    "gain-scheduled": "swiftcruise.baselines.gain_scheduled:GainScheduledPID",
    "fuzzy-pid": "swiftcruise.baselines.fuzzy:FuzzyPID",
    "cruise": "swiftcruise.baselines.cruise:CruisePolicy",
}


def register(name: str, factory: str | Callable[..., Policy]) -> None:
    """Make a policy available by name: a factory, or "module:attribute" to import on demand."""
    REGISTRY[name] = factory


def make_policy(name: str, defaults: Mapping[str, Any] | None = None, **options: Any) -> Policy:
    """The policy registered under `name` (or at "package.module:Class"), built with `options`.

    A `name` that ends in ".yaml" is a policy file (`policy_file`): its options hold where `options` does not say
    otherwise.

    `defaults` are what the run knows anyway (a memory cap, say): given where the policy has a parameter of that name
    and `options` does not say otherwise.

    Raises:
        UnknownPolicy: no such name; the message lists the known ones.
        ConfigError: the policy refuses an option, or the policy file cannot be used.
    """
    if is_policy_file(name):
        file = read_policy_file(name)
        name, options = file.policy, {**file.policy_options, **options}
    target = REGISTRY.get(name, name if ":" in name else None)
    if target is None:
        close = difflib.get_close_matches(name, REGISTRY, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise UnknownPolicy(f"policy={name!r} is not known: {hint}choose one of {', '.join(sorted(REGISTRY))}")
    if isinstance(target, str):
        module, _, attribute = target.partition(":")
        try:
            target = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise UnknownPolicy(f"policy={name!r} cannot be loaded from {module}:{attribute}: {error}") from error
    parameters = inspect.signature(target).parameters
    known = {key: value for key, value in (defaults or {}).items() if key in parameters}
    try:
        return target(**(known | options))
    except TypeError as error:
        raise ConfigError(f"policy_options={options!r} do not suit policy {name!r}: {error}") from error

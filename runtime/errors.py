"""Errors that swiftcruise raises on purpose. Each message names the field, the value and the remedy."""

from __future__ import annotations


class SwiftcruiseError(Exception):
    """Base class: what a user can mend. The command line prints it without a traceback."""


class ConfigError(SwiftcruiseError):
    """A configuration value that cannot be used."""


class UnsupportedTraining(SwiftcruiseError):
    """A training that the hook cannot control safely; `--observe` still watches it."""


class UnknownPolicy(SwiftcruiseError):
    """A policy name that no registry entry answers to."""

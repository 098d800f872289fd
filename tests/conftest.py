"""Fixtures shared by the tests that train for real."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from .training import Lab

# How long an example takes says something about the machine, not about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The tiny model with its data sets, and ms-swift to train it in this process."""
    import torch

    # One thread: equal to the last bit from run to run, and no spinning beside other processes.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Lab(tmp_path_factory.mktemp("lab"))
    torch.set_num_threads(threads)

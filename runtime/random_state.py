"""torch's random state, to be put back where a computation is repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RandomState:
    """The state of torch's random numbers at this moment, on the CPU and on every CUDA device that a model lies on.

    Args:
        model: The model; None stands for the current CUDA device.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        import torch

        self._cpu = torch.get_rng_state()
        self._cuda: dict[int, torch.Tensor] = {}
        if torch.cuda.is_initialized():
            current = torch.cuda.current_device()
            devices = {current}
            if model is not None:
                devices |= {
                    current if p.device.index is None else p.device.index for p in model.parameters() if p.is_cuda
                }
            self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def restore(self) -> None:
        """Put it back; may be called any number of times."""
        import torch

        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)

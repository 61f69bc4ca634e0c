"""What the trainer keeps of one run, in memory and on disk.

A folder holds, for `adapter`, the files of `lora/peft_folder.py`; for `optimizer` also
`optimizer.safetensors`; for `snapshot` also `gradients.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.contract import Contents, Failure, OptimStep, StepResult
from backends.lora.adapter import Adapter, Target
from backends.lora.atomic_folder import new_folder
from backends.lora.peft_folder import AdapterFolderError, load_adapter, write_adapter
from backends.optimizers.adamw import AdamW

_OPTIMIZER = "optimizer.safetensors"
_GRADIENTS = "gradients.safetensors"


class RunFolderError(Exception):
    """The folder cannot be taken up as a run; the message says why."""


class RunState:
    """An adapter, its moments, and the gradient that waits for a step. All float32."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self._optimizer = AdamW(adapter)
        self._gradient: list[Tensor] | None = None
        self._num_gradients = 0

    def add_gradient(self, gradient: Sequence[Tensor]) -> None:
        """Add one request's gradient, in the order of `adapter.named_tensors()`; takes it over."""
        if self._gradient is None:
            self._gradient = list(gradient)
        else:
            torch._foreach_add_(self._gradient, list(gradient))
        self._num_gradients += 1

    def step(self, hyper: OptimStep) -> StepResult | Failure:
        """Apply the gradient and clear it; a Failure leaves it waiting."""
        result = self._optimizer.step(self._gradient, hyper, self._num_gradients)
        if isinstance(result, StepResult):
            self._gradient, self._num_gradients = None, 0
        return result

    def save(self, directory: str | Path, contents: Contents, base_model_name: str) -> int:
        """Write a folder that appears whole or not at all; its size in bytes."""
        with new_folder(directory) as folder:
            write_adapter(self.adapter, folder, base_model_name)
            if contents != "adapter":
                self._optimizer.save(folder / _OPTIMIZER)
            if contents == "snapshot":
                self._save_gradient(folder / _GRADIENTS)
            return sum(file.stat().st_size for file in folder.iterdir())

    @classmethod
    def load(
        cls,
        directory: str | Path,
        contents: Contents,
        targets: Sequence[Target],
        device: torch.device,
    ) -> RunState:
        """Raises RunFolderError, also when the folder was saved with less than `contents`."""
        try:
            state = cls(load_adapter(directory, targets, device))
            if contents != "adapter":
                state._optimizer.load(Path(directory) / _OPTIMIZER)
            if contents == "snapshot":
                state._load_gradient(Path(directory) / _GRADIENTS)
        except (AdapterFolderError, OSError, SafetensorError, KeyError, TypeError) as error:
            raise RunFolderError(f"cannot load {contents} from {directory}: {error}") from error
        return state

    def _save_gradient(self, path: Path) -> None:
        tensors = {}
        if self._gradient is not None:
            names = [name for name, _ in self.adapter.named_tensors()]
            tensors = {
                name: tensor.cpu().contiguous()
                for name, tensor in zip(names, self._gradient, strict=True)
            }
        count = {"num_gradients": str(self._num_gradients)}
        save_file(tensors, path, metadata={"format": "pt", **count})

    def _load_gradient(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self._num_gradients = int(file.metadata()["num_gradients"])
            if self._num_gradients:
                self._gradient = [
                    file.get_tensor(name).to(tensor.device)
                    for name, tensor in self.adapter.named_tensors()
                ]

"""What the trainer keeps of one run, in memory and on disk.

A folder holds, for `adapter`, the files of `lora/peft_folder.py`; for `optimizer` also
`optimizer.safetensors`; for `snapshot` also `gradients.safetensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from backends.contract import Contents, Failure, OptimStep, RunMemory, StepResult
from backends.lora.adapter import Adapter, Target
from backends.lora.atomic_folder import new_folder
from backends.lora.peft_folder import AdapterFolderError, load_adapter, write_adapter
from backends.optimizers import adamw
from backends.optimizers.adamw import Moments, Update
from backends.training.ranks import Part, Ranks
from backends.training.slots import moved

HOST = torch.device("cpu")
"""Where runs begin; `Slots` brings them to the device."""

_OPTIMIZER = "optimizer.safetensors"
_GRADIENTS = "gradients.safetensors"
_UNREADABLE = (AdapterFolderError, OSError, SafetensorError, KeyError, TypeError, ValueError)


class RunFolderError(Exception):
    """The folder cannot be taken up as a run; the message says why."""


class RunState:
    """An adapter, its moments, and the gradient that waits for a step: vectors of one layout,
    all float32 and on one device. Where several processes hold a trainer together, each has its
    part of these vectors; a folder has the whole."""

    def __init__(self, adapter: Adapter, ranks: Ranks) -> None:
        """`adapter` is whole."""
        self._ranks = ranks
        self.whole = adapter.layout
        """Of the whole adapter."""
        local = ranks.local(adapter.layout)
        self.adapter = Adapter(adapter.spec, local, self._cut(adapter.flat))
        """What this process has of it."""
        self._moments: Moments | None = None
        self._num_steps = 0
        self._gradient: Tensor | None = None
        self._num_gradients = 0

    def add_gradient(self, gradient: Tensor) -> None:
        """Add one request's gradient float32[p]; takes it over."""
        if self._gradient is None:
            self._gradient = gradient
        else:
            self._gradient.add_(gradient)
        self._num_gradients += 1

    def _update(self, step: OptimStep) -> Update | None:
        if self._gradient is None:
            return None
        moments = self._moments or Moments.zero(self.adapter.flat)
        return Update(self.adapter.flat, self._gradient, moments, self._num_steps, step)

    def _stepped(self, update: Update | None, outcome: float | Failure) -> StepResult | Failure:
        if isinstance(outcome, Failure):
            return outcome
        if update is not None:
            self._moments, self._gradient = update.moments, None
            self._num_steps += 1
        num_gradients, self._num_gradients = self._num_gradients, 0
        return StepResult(
            metrics={
                "grad_norm": outcome,
                "num_gradients": float(num_gradients),
                "step": float(self._num_steps),
            }
        )

    def save(self, directory: str | Path, contents: Contents, base_model_name: str) -> int:
        """Write a folder that appears whole or not at all; its size in bytes, 0 where others
        lead."""
        whole = self._joined(contents)
        if not self._ranks.leads:
            return 0
        adapter = Adapter(self.adapter.spec, self.whole, whole["weights"])
        with new_folder(directory) as folder:
            write_adapter(adapter, folder, base_model_name)
            if contents != "adapter":
                moments = None
                if "exp_avg" in whole:
                    moments = Moments(whole["exp_avg"], whole["exp_avg_sq"])
                adamw.save(moments, self._num_steps, self.whole, folder / _OPTIMIZER)
            if contents == "snapshot":
                self._save_gradient(whole.get("gradient"), folder / _GRADIENTS)
            return sum(file.stat().st_size for file in folder.iterdir())

    def _joined(self, contents: Contents) -> dict[str, Tensor]:
        """What there is of it, whole, where this process leads; else nothing."""
        vectors = {"weights": self.adapter.flat}
        if contents != "adapter" and self._moments is not None:
            vectors |= self._moments._asdict()
        if contents == "snapshot" and self._gradient is not None:
            vectors["gradient"] = self._gradient
        joined = {name: self._ranks.join(Part(self.whole, v)) for name, v in vectors.items()}
        return {name: vector for name, vector in joined.items() if vector is not None}

    @classmethod
    def load(
        cls,
        directory: str | Path,
        contents: Contents,
        targets: Sequence[Target],
        ranks: Ranks,
    ) -> RunState:
        """On the CPU. Raises RunFolderError, also when the folder was saved with less than
        `contents`."""
        try:
            state = cls(load_adapter(directory, targets, HOST), ranks)
            if contents != "adapter":
                state._load_moments(Path(directory) / _OPTIMIZER)
            if contents == "snapshot":
                state._load_gradient(Path(directory) / _GRADIENTS)
        except _UNREADABLE as error:
            raise RunFolderError(f"cannot load {contents} from {directory}: {error}") from error
        return state

    def _cut(self, flat: Tensor) -> Tensor:
        return self._ranks.cut(self.whole, flat)

    def _save_gradient(self, gradient: Tensor | None, path: Path) -> None:
        tensors = {}
        if gradient is not None:
            named = self.whole.named_tensors(gradient.cpu())
            tensors = {name: tensor.contiguous() for name, tensor in named}
        count = {"num_gradients": str(self._num_gradients)}
        save_file(tensors, path, metadata={"format": "pt", **count})

    def _load_moments(self, path: Path) -> None:
        moments, self._num_steps = adamw.load(self.whole, path)
        self._moments = moments and Moments(*map(self._cut, moments))

    def _load_gradient(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            self._num_gradients = int(file.metadata()["num_gradients"])
            if self._num_gradients:
                self._gradient = self._cut(self.whole.flat(file.get_tensor))

    @property
    def device(self) -> torch.device:
        return self.adapter.flat.device

    @property
    def num_bytes(self) -> int:
        return self.memory(self.device).total

    def move(self, device: torch.device) -> None:
        self.adapter = replace(self.adapter, flat=moved(self.adapter.flat, device))
        if self._moments is not None:
            self._moments = Moments(*(moved(m, device) for m in self._moments))
        if self._gradient is not None:
            self._gradient = moved(self._gradient, device)

    def memory(self, device: torch.device) -> RunMemory:
        """`device` is where the base model is."""
        weights = self.adapter.flat.nbytes
        return RunMemory(
            weights=weights,
            moments=0 if self._moments is None else 2 * weights,
            gradient=0 if self._gradient is None else weights,
            on_device=self.device == device,
        )


def step_together(
    runs: Sequence[RunState], steps: Sequence[OptimStep], ranks: Ranks
) -> list[StepResult | Failure]:
    """Apply each run's gradient and clear it; a Failure leaves it waiting. No run comes twice.

    Without a gradient weights and moments stay as they are, as in torch. Metrics: `grad_norm`,
    global L2 norm before clipping; `num_gradients`, how many forward_backward requests were
    added up (0: the step did nothing); `step`, steps taken in this run so far.
    """
    updates = [run._update(step) for run, step in zip(runs, steps, strict=True)]
    waiting = [
        (update, Part(run.whole, update.gradient))
        for run, update in zip(runs, updates, strict=True)
        if update is not None
    ]
    norms = ranks.norms([part for _, part in waiting])
    outcomes = iter(adamw.step([update for update, _ in waiting], norms))
    return [
        run._stepped(update, 0.0 if update is None else next(outcomes))
        for run, update in zip(runs, updates, strict=True)
    ]

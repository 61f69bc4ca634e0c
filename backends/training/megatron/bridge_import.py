"""The import of Megatron-Bridge, without TransformerEngine where that is not installed: the layers
used here are plain torch."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import types
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

_ENGINE = "transformer_engine"
_WANTS_IT = "megatron.bridge.peft"


def import_bridge() -> None:
    """Before anything else of `megatron`; harmless to repeat."""
    if importlib.util.find_spec(_ENGINE) is not None:
        importlib.import_module("megatron.bridge")
        return
    with _stand_in(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a dozen, all of what is not installed
        importlib.import_module("megatron.bridge")
        # The router asks whether there is this kernel, by a name that 0.16 forgot to give it.
        moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        moe.te_general_gemm = getattr(moe, "te_general_gemm", None)


@contextmanager
def _stand_in() -> Generator[None]:
    """The bridge's own LoRA layers, which are not used here, derive from TransformerEngine's and
    are imported with everything else of it. Only they are given something to derive from: whoever
    asks whether TransformerEngine is there must hear that it is not."""
    layers: Any = types.ModuleType(f"{_ENGINE}.pytorch")
    layers.__getattr__ = lambda name: type(name, (torch.nn.Module,), {})
    root: Any = types.ModuleType(_ENGINE)
    root.pytorch, layers.ops = layers, layers
    real = builtins.__import__

    def wrapped(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        importer = str((globals or {}).get("__name__", ""))
        if name.split(".")[0] == _ENGINE and importer.startswith(_WANTS_IT):
            return layers if fromlist else root
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = wrapped
    try:
        yield
    finally:
        builtins.__import__ = real

"""The trainer on Megatron: a base model that is divided among processes."""

import torch

from backends.training.megatron import cpu
from backends.training.megatron.bridge_import import import_bridge

import_bridge()
if not torch.cuda.is_available():
    cpu.install()

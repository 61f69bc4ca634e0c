"""The trainer on Megatron: a base model that is divided among processes.

Importing anything of it imports Megatron, which has to be told first where there is no CUDA.
"""

import torch

from backends.training.megatron import cpu

if not torch.cuda.is_available():
    cpu.install()

"""The same SFT run without a service, for `one_tenant.py`: torch and PEFT, in a process of its own.

    python -m tests.benchmarks.bare_loop --model DIR --adapter PEFT_DIR --threads N

Makes one step for every line it reads, and answers with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from tests.benchmarks.peft_model import load_base, summed_loss
from tests.benchmarks.recipe import BETAS, EPS, LEARNING_RATE, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter", type=Path, required=True, help="where to start from")
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = load_base(options.model)
    sequences = torch.from_numpy(batch(base.config.vocab_size))
    model = PeftModel.from_pretrained(base, str(options.adapter), is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, foreach=True
    )
    for _ in sys.stdin:
        wall, processor = time.perf_counter(), time.process_time()
        loss = _step(model, optimizer, sequences)
        answer = {
            "loss": loss,
            "wall_s": time.perf_counter() - wall,
            "processor_s": time.process_time() - processor,
        }
        print(json.dumps(answer), flush=True)


def _step(model: PeftModel, optimizer: torch.optim.Optimizer, sequences: Tensor) -> float:
    loss = summed_loss(model, sequences[:, :-1], sequences[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


if __name__ == "__main__":
    main()

"""The numbers of the design, on the machine at hand: `make bench`, or

    python -m tests.benchmarks.bench [--quick] [--only GROUP] [--out FILE]

Prints a table as it goes and writes JSON. Ends with 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from transformers.utils import logging

from tests.benchmarks import (
    flood,
    gpu,
    logits_peak,
    many_adapters,
    many_runs,
    no_op,
    one_tenant,
    passes,
    vllm_sampling,
)
from tests.benchmarks.machine import facts
from tests.benchmarks.report import Row, details, header, line, write_json
from tests.benchmarks.scale import MODEL_NAME, Scale, full, quick

Group = Callable[[Scale], Iterator[Row]]

GROUPS: Mapping[str, Group] = {
    "one-tenant": one_tenant.rows,
    "passes": passes.rows,
    "logits": logits_peak.rows,
    "no-op": no_op.rows,
    "flood": flood.rows,
    "many-adapters": many_adapters.rows,
    "many-runs": many_runs.rows,
    **({"vllm-sampling": vllm_sampling.rows} if vllm_sampling.available() else {}),
    **({"gpu": gpu.rows} if torch.cuda.is_available() else {}),
}


def main() -> None:
    options = _parse()
    warnings.simplefilter("ignore")  # the libraries' words would stand between the rows
    logging.disable_progress_bar()
    threads = options.threads or os.cpu_count() or 1
    scale = (quick if options.quick else full)(options.model, threads)
    began = {**facts(), "quick": options.quick, "threads": threads}
    rows: list[Row] = []
    print(header())
    try:
        for name in options.only or GROUPS:
            for row in GROUPS[name](scale):
                rows.append(row)
                print(line(row), flush=True)
                if row.details:
                    print(details(row), flush=True)
    finally:  # what was measured is kept, whatever ended the rest
        write_json(options.out, rows, began)
    missed = [row for row in rows if not row.passed]
    print(f"{len(rows) - len(missed)} of {len(rows)} within their targets; {options.out}")
    sys.exit(1 if missed else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer runs")
    parser.add_argument("--only", action="append", choices=list(GROUPS), help="may be repeated")
    parser.add_argument("--out", type=Path, default=Path("bench-out/bench.json"))
    parser.add_argument("--model", type=Path, default=Path("models") / MODEL_NAME)
    parser.add_argument("--threads", type=int, default=0, help="of the workers; 0 takes every core")
    return parser.parse_args()


if __name__ == "__main__":
    main()

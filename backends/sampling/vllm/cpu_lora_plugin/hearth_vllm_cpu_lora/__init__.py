"""A vLLM plugin for its CPU backend, written against 0.32. Elsewhere it does nothing.

Cured here (each is wrong in the stock CPU path, and shown by tests/vllm/test_stock_faults.py):
- rows without an adapter got the delta of whatever adapter sits in the last slot;
- prompt logprobs beside LoRA took the sampler's row table for rows of the prompt: wrong values for
  one request a step, a dead engine for several;
- a request with nan in its weights left nan to later requests of everybody;
- every row copied its whole LoRA matrix: now one product for the rows of each adapter.
Added: `prompt_logprob_token_ids`, which vLLM computes only in its GPU model runner.
"""

from __future__ import annotations

import logging

_PUNICA = "hearth_vllm_cpu_lora.punica.GroupedPunicaCPU"

_log = logging.getLogger("vllm.hearth_cpu_lora")


def register() -> None:
    """Called by vLLM, maybe more than once a process."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from hearth_vllm_cpu_lora import clean_blocks, prompt_scores

    platform = type(current_platform)
    platform.get_punica_wrapper = classmethod(lambda cls: _PUNICA)
    clean_blocks.install()
    prompt_scores.install()
    _log.info("Hearth's CPU LoRA path is on")

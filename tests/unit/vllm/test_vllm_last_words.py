"""Of the logs of vLLM 0.32, shortened."""

from __future__ import annotations

from backends.sampling.vllm.last_words import first_error

NO_MEMORY = """\
(APIServer pid=1) WARNING 11-30 02:05:23 [system_utils.py:255] Found ulimit of 20000 and failed. \
This can cause fd limit errors like `OSError: [Errno 24] Too many open files`
(EngineCore pid=2) ERROR 11-30 02:05:36 [core.py:1510] EngineCore failed to start.
(EngineCore pid=2) ERROR 11-30 02:05:36 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=2) ERROR 11-30 02:05:36 [core.py:1510]     raise ValueError(
(EngineCore pid=2) ERROR 11-30 02:05:36 [core.py:1510] ValueError: No available memory for blocks.
Process EngineCore:
ValueError: No available memory for blocks.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
(APIServer pid=1) INFO 11-30 02:05:37 [launcher.py:1] Shutting down
"""
NO_MODEL = """\
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, the checkpoint has model type `x` [type=value_error]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
USAGE = """\
usage: api_server.py [-h] [--model MODEL]
api_server.py: error: argument --dtype: invalid choice: 'int3'
"""


def test_the_error_that_the_others_follow_from_is_told():
    told = first_error(NO_MEMORY)
    assert told is not None
    assert told.startswith("ValueError: No available memory for blocks. | Process EngineCore")


def test_an_error_of_several_lines_is_told_in_one():
    assert first_error(NO_MODEL) == (
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig | Value "
        "error, the checkpoint has model type `x` [type=value_error] | For further information "
        "visit https://errors.pydantic.dev/2.14/v/value_error"
    )


def test_an_option_that_vllm_does_not_know_is_told():
    assert first_error(USAGE) == "api_server.py: error: argument --dtype: invalid choice: 'int3'"


def test_a_log_without_errors_has_none():
    assert first_error("INFO 11-30 02:05:37 [launcher.py:1] Shutting down\n") is None

"""The SDK never closes the connections of its pools: they go with the process, some of them after
the last test. For the conftest of tests that use it."""

from __future__ import annotations

import warnings

import pytest

_LEAKS: list[tuple[str, type[Warning]]] = [
    (r"unclosed transport <_SelectorSocketTransport", ResourceWarning),
    (r"unclosed <socket.socket .*raddr=\('127.0.0.1'", ResourceWarning),
    (
        r"Exception ignored in. <(socket.socket .*raddr=\('127.0.0.1'|function _SelectorTr)",
        pytest.PytestUnraisableExceptionWarning,
    ),
]


def pytest_configure(config: pytest.Config) -> None:
    for message, category in _LEAKS:
        name = f"{category.__module__}.{category.__name__}"
        config.addinivalue_line("filterwarnings", f"ignore:{message}:{name}")


def pytest_unconfigure() -> None:
    """After the last test the filters of the whole run apply, which pytest read before it came to
    any conftest."""
    for message, category in _LEAKS:
        warnings.filterwarnings("ignore", message, category)

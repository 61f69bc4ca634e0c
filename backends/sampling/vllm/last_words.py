"""Why a vLLM ended, out of its log: its errors are followed by long traces and notices."""

from __future__ import annotations

import re

_LONGEST = 600
"""Characters of an error, which may go on for some lines."""
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?", re.MULTILINE)
"""What vLLM puts before a line: process, level, time and place."""
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception)\b:?|[\w.]+: error:) ", re.MULTILINE)
"""How an error is told at the end of a trace, or by the parser of the command line."""


def first_error(log: str) -> str | None:
    """In one line; None where the log tells of none. Later ones follow from the first."""
    text = _PREFIX.sub("", log)
    found = _ERROR.search(text)
    if found is None:
        return None
    told = text[found.start() : found.start() + _LONGEST].splitlines()
    return " | ".join(line.strip() for line in told if line.strip())

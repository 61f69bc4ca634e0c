"""What a streamed request has gained already, when it is generated again on another replica."""

from __future__ import annotations

from collections.abc import Callable

from backends.contract import Failure, SampleDelta, TopkLogprobs
from backends.sampling.vllm.errors import RequestFailed

_CHANGED = Failure(
    message="a sampling replica was lost in the middle of the stream, and another one continues "
    "the text otherwise",
    category="server",
)


class Delivered:
    """Passes on what is new. Call `again` before each attempt."""

    def __init__(self, deliver: Callable[[SampleDelta], None]) -> None:
        self._deliver = deliver
        self._tokens: dict[int, list[int]] = {}
        """By sample, all that was passed on."""
        self._repeated: dict[int, int] = {}
        """By sample, how much of that this attempt has repeated."""

    def again(self) -> None:
        self._repeated = dict.fromkeys(self._tokens, 0)

    def add(self, delta: SampleDelta) -> None:
        """Raises RequestFailed when the attempt contradicts what was passed on before."""
        known = self._tokens.setdefault(delta.index, [])
        start = self._repeated.setdefault(delta.index, 0)
        tokens = delta.tokens.tolist()
        overlap = min(len(known) - start, len(tokens))
        if tokens[:overlap] != known[start : start + overlap]:
            raise RequestFailed(_CHANGED)
        self._repeated[delta.index] = start + len(tokens)
        if overlap < len(tokens):
            known += tokens[overlap:]
            self._deliver(_without(delta, overlap))


def _without(delta: SampleDelta, count: int) -> SampleDelta:
    """The delta without its first tokens."""
    topk = delta.topk
    return SampleDelta(
        index=delta.index,
        tokens=delta.tokens[count:],
        logprobs=delta.logprobs[count:],
        topk=None
        if topk is None
        else TopkLogprobs(token_ids=topk.token_ids[count:], logprobs=topk.logprobs[count:]),
    )

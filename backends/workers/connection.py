"""The service's end of the socket to a worker: many calls under way at once, by id."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from itertools import count

from backends.contract import BackendError
from backends.workers.messages import READY_CALL, Broke, Call, Progressed, Reply
from backends.workers.wire import HEADER, Decoder, MalformedFrameError, Part, encode, new_body


class Connection:
    """Sends calls in order and hands every reply to whoever waits for it, until the other end
    closes; then every call under way waits for `fail` to say why."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = Decoder[Reply](Reply)
        self._ids = count(READY_CALL + 1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._listeners: dict[int, Callable[[Progressed], None]] = {}
        self._outbox = asyncio.Queue[list[Part]]()
        self._broken: BackendError | None = None
        self._ready = self._expect(READY_CALL)
        self._sender = asyncio.create_task(self._send_all())
        self._receiver = asyncio.create_task(self._receive_all())

    @property
    def closed(self) -> bool:
        """Whether the other end is gone, or this one was ended."""
        return self._receiver.done()

    async def ready(self) -> None:
        """Returns when the worker says that it is. Raises BackendError when it never will."""
        reply = await self._ready
        if isinstance(reply, Broke):
            raise BackendError(reply.message)

    async def call(self, call: Call) -> Reply:
        """Raises BackendError when the connection ends before the reply."""
        return await self.post(call)

    def post(self, call: Call) -> asyncio.Future[Reply]:
        """Put a call on its way; the reply may be left alone."""
        return self._post(call)[1]

    def follow(self, call: Call, listener: Callable[[Progressed], None]) -> asyncio.Future[Reply]:
        """Like `post`; the listener hears of what comes before the reply."""
        call_id, future = self._post(call)
        self._listeners[call_id] = listener
        future.add_done_callback(lambda _: self._listeners.pop(call_id, None))
        return future

    async def wait_closed(self) -> None:
        """Returns when the other end is gone."""
        await asyncio.wait([self._receiver])

    async def fail(self, error: BackendError) -> None:
        """End it: every call under way, and every later one, raises the error."""
        self._broken = error
        for task in (self._sender, self._receiver):
            task.cancel()
        await asyncio.wait([self._sender, self._receiver])
        self._socket.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                # Nobody has to look at it: a posted call may have been left alone.
                future.exception()
        self._waiting.clear()

    def _post(self, call: Call) -> tuple[int, asyncio.Future[Reply]]:
        if self._broken is not None:
            raise self._broken
        call_id = next(self._ids)
        self._outbox.put_nowait(encode(call_id, call))
        return call_id, self._expect(call_id)

    def _expect(self, call_id: int) -> asyncio.Future[Reply]:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        return future

    async def _send_all(self) -> None:
        """One frame after the other, whole: a caller that is cancelled cannot cut one in two.
        A connection that ends is for the receiver to notice."""
        try:
            while True:
                # No name for the frame here: it would live on until the next one comes.
                await self._send(await self._outbox.get())
        except OSError:
            return

    async def _send(self, parts: list[Part]) -> None:
        loop = asyncio.get_running_loop()
        for part in parts:
            await loop.sock_sendall(self._socket, part)

    async def _receive_all(self) -> None:
        try:
            while True:
                await self._receive()
        except (EOFError, OSError):
            return

    async def _receive(self) -> None:
        raw = bytearray(HEADER.size)
        await self._fill(memoryview(raw))
        header, body = new_body(raw)
        await self._fill(body.data)
        future = self._waiting.get(header.call_id)
        if future is None or future.done():
            self._waiting.pop(header.call_id, None)
            return
        try:
            reply = self._decoder.decode(header, body)
        except MalformedFrameError as error:
            del self._waiting[header.call_id]
            future.set_exception(BackendError(f"malformed reply: {error}"))
            return
        if isinstance(reply, Progressed):
            self._listeners[header.call_id](reply)
        else:
            del self._waiting[header.call_id]
            future.set_result(reply)

    async def _fill(self, view: memoryview) -> None:
        loop = asyncio.get_running_loop()
        while len(view):
            received = await loop.sock_recv_into(self._socket, view)
            if not received:
                raise EOFError
            view = view[received:]

"""The form of messages between processes: frozen msgspec structs as plain data, in frames that begin with their length.

A receiver names the structs that a conversation has, and refuses everything else. Unlike pickle, this runs no code that
the other end chooses. The standard library's `marshal` writes the data, and not JSON or MessagePack: msgspec encodes
only text that is UTF-8, and paths, arguments and environment variables may contain any bytes; JSON has no tuples, which
plugins add to reports. Data made to do so can crash marshal, so it is for processes of one session only.

The frames are those of `multiprocessing.connection.Connection.send_bytes`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from marshal import dumps, loads
from struct import Struct as BinaryFormat
from threading import Lock
from typing import TYPE_CHECKING, Any

from msgspec import MsgspecError, Struct, convert, defstruct, to_builtins

if TYPE_CHECKING:
    from asyncio import StreamReader

_describing_types = Lock()
"""Held while msgspec decodes, since several threads do so.

At the first use of a type, msgspec makes a description of it. If two threads do so at the same time, the process dies
of a segmentation fault (seen with msgspec 0.22).
"""
LENGTH = BinaryFormat("!i")
"""The head of a frame: the number of bytes that follow."""
_VERSION = 4
"""Version of marshal's format, which each Python has that the plugin supports."""


def encode(message: object) -> bytes:
    """Return the bytes of `message`; :func:`decode` is the inverse."""
    return dumps(to_builtins(message, builtin_types=(bytes,), enc_hook=_plain), _VERSION)


def _plain(value: object) -> object:
    """Return `value` as marshal has it: arguments of marks may have a suite's own kind of `str`, `int` or `float`."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"a message cannot have a value of the type {type(value).__qualname__}: {value!r}")


def decode(data: bytes, form: Any) -> Any:
    """Return the message in `data`; raise ValueError if it is not of the type `form`, such as a union of structs."""
    try:
        return from_builtins(loads(data), form)
    except (EOFError, TypeError, RecursionError, MsgspecError) as error:
        raise ValueError(f"not a message: {error}") from None


def from_builtins(data: object, form: Any) -> Any:
    """Return the object of the type `form` for which `data` stands. Any thread may call this."""
    with _describing_types:
        return convert({"message": data}, _holder(form), str_keys=True).message  # type: ignore[attr-defined]


@cache
def _holder(form: Any) -> type[Struct]:
    """Return a struct with a field of the type `form`: msgspec describes it once, and a union of structs each time."""
    return defstruct("Holder", [("message", form)])


def frame(data: bytes) -> bytes:
    """Return `data` with its length before it."""
    return LENGTH.pack(len(data)) + data


async def read_message(reader: StreamReader, form: Any) -> Any:
    """Read a frame, and return its message; None if the connection has ended, maybe within a frame."""
    with suppress(ConnectionError, EOFError):
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return decode(await reader.readexactly(length), form)
    return None

"""The form of messages between processes: frozen msgspec structs as JSON, in frames that begin with their length.

A receiver names the structs that a conversation has, and refuses everything else. Unlike pickle, this runs no code that
the other end chooses. MessagePack was rejected: msgspec encodes only text that is UTF-8, and paths, arguments and
environment variables may contain any bytes.

The frames are those of `multiprocessing.connection.Connection.send_bytes`.
"""

from __future__ import annotations

from json import dumps, loads
from struct import Struct as BinaryFormat
from threading import Lock
from typing import TYPE_CHECKING, Any

from msgspec import convert, to_builtins

if TYPE_CHECKING:
    from asyncio import StreamReader

_describing_types = Lock()
"""Held while msgspec decodes, since several threads do so.

At the first use of a type, msgspec makes a description of it. If two threads do so at the same time, the process dies
of a segmentation fault (seen with msgspec 0.22).
"""
LENGTH = BinaryFormat("!i")
"""The head of a frame: the number of bytes that follow."""


def encode(message: object) -> bytes:
    """Return the bytes of `message`, one line of text; :func:`decode` is the inverse."""
    return dumps(to_builtins(message, str_keys=True, enc_hook=_plain)).encode()


def _plain(value: object) -> object:
    """Return `value` as JSON has it. Arguments of marks may have a suite's own subclasses of `str`, `int`, `float`."""
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
    except RecursionError:
        raise ValueError("the message is nested too deeply") from None


def from_builtins(data: object, form: Any) -> Any:
    """Return the object of the type `form` for which `data` stands. Any thread may call this."""
    with _describing_types:
        return convert(data, form, str_keys=True)


def frame(data: bytes) -> bytes:
    """Return `data` with its length before it."""
    return LENGTH.pack(len(data)) + data


async def read_message(reader: StreamReader, form: Any) -> Any:
    """Read a frame, and return its message; raise an error of :meth:`StreamReader.readexactly` at the end."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return decode(await reader.readexactly(length), form)

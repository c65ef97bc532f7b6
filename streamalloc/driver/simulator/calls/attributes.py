"""Attributes of streams. They are kept, and change nothing but the priority that a stream says it has."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from streamalloc.driver.bindings import cuda

from ..errors import check, not_modelled
from ..timeline import Stream
from .base import Calls

# CUstreamAttrID
_WINDOW, _POLICY, _PRIORITY, _DOMAIN_MAP, _DOMAIN = 1, 3, 8, 9, 10
_SIZE = 64
"""Bytes of a CUstreamAttrValue."""
_NUMBER = struct.Struct("=i")
_PAIR = struct.Struct("=BB")
_ACCESS = struct.Struct("=QQfii")
_PERSISTING = 2  # CUaccessProperty
_POLICIES = range(1, 5)  # CUsynchronizationPolicy
_DOMAINS = 4

# Of a stream for which nothing was set (observed on H200: test_stream_attributes).
_DEFAULTS = {
    _WINDOW: _ACCESS.pack(0, 0, 0.0, 0, 0),
    _POLICY: _NUMBER.pack(-1),
    _DOMAIN_MAP: _PAIR.pack(0, 1),
    _DOMAIN: _NUMBER.pack(0),
}


class StreamAttributeCalls(Calls):
    """cuStreamGetAttribute, cuStreamSetAttribute, cuStreamCopyAttributes."""

    def cuStreamGetAttribute(self, hStream: Any, attr: Any) -> Any:
        stream, number = self._stream(hStream), int(attr)
        check(number in _DEFAULTS or number == _PRIORITY)
        kept = {_PRIORITY: _NUMBER.pack(stream.priority), **_DEFAULTS, **stream.attributes}[number]
        value = cuda.CUstreamAttrValue()
        ctypes.memmove(int(value.getPtr()), kept, len(kept))
        return value

    def cuStreamSetAttribute(self, hStream: Any, attr: Any, value: Any) -> None:
        stream, number = self._stream(hStream), int(attr)
        not_modelled(value is None, "cuStreamSetAttribute of None: the real driver crashes")
        given = ctypes.string_at(int(value.getPtr()), _SIZE)
        if number == _PRIORITY:
            least, greatest = self._machine.profile.stream_priorities
            stream.priority = min(max(_NUMBER.unpack_from(given)[0], greatest), least)
            return
        check(number in _DEFAULTS)
        self._check(stream, number, given)
        stream.attributes[number] = given[: len(_DEFAULTS[number])]

    @staticmethod
    def _check(stream: Stream, number: int, given: bytes) -> None:
        if number == _POLICY:
            check(_NUMBER.unpack_from(given)[0] in _POLICIES)
        elif number == _DOMAIN:
            check(_NUMBER.unpack_from(given)[0] in (0, 1))
        elif number == _DOMAIN_MAP:
            check(max(_PAIR.unpack_from(given)) < _DOMAINS)
        else:
            _, size, ratio, _, missing = _ACCESS.unpack_from(given)
            check(0 <= ratio <= 1 and missing != _PERSISTING)
            check(size <= stream.context.device.attributes["MAX_ACCESS_POLICY_WINDOW_SIZE"])

    def cuStreamCopyAttributes(self, dst: Any, src: Any) -> None:
        target, source = self._stream(dst), self._stream(src)
        check(target.context is source.context)
        target.attributes, target.priority = dict(source.attributes), source.priority

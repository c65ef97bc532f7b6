"""What the rest of the package takes of the driver beside its public names: the bindings, and how they differ, and the
driver that the environment asks for."""

from streamalloc.driver.bindings import (
    BINDINGS_VERSION,
    OpaqueStruct,
    check_name,
    cuda,
    enum_member,
    handle_types_member,
    opaque_bytes,
    opaque_struct,
    read_handle_types,
    version_that_added,
)
from streamalloc.driver.selection import as_asked

__all__ = [
    "BINDINGS_VERSION",
    "OpaqueStruct",
    "as_asked",
    "check_name",
    "cuda",
    "enum_member",
    "handle_types_member",
    "opaque_bytes",
    "opaque_struct",
    "read_handle_types",
    "version_that_added",
]

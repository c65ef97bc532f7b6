"""What the rest of the package takes of the driver beside its public names: the bindings, and how they differ."""

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

__all__ = [
    "BINDINGS_VERSION",
    "OpaqueStruct",
    "check_name",
    "cuda",
    "enum_member",
    "handle_types_member",
    "opaque_bytes",
    "opaque_struct",
    "read_handle_types",
    "version_that_added",
]

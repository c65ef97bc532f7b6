"""Private names of ``driver`` that other areas of the package may import."""

from streamalloc.driver.account import COUNTED, SETTLERS, HandleCounts
from streamalloc.driver.bindings import (
    BINDINGS_VERSION,
    c_signature,
    check_name,
    cuda,
    enum_member,
    handle_types_member,
    opaque_bytes,
    opaque_struct,
    parameters,
    prop_bytes,
    read_handle_types,
    runtime,
    version_that_added,
)
from streamalloc.driver.block_kernel import COPY_KERNEL, COPY_MOST, block_copies, copy_ptx
from streamalloc.driver.errors import PreventedCallError
from streamalloc.driver.locks import Lock, RLock, ThreadLocal
from streamalloc.driver.parent import VARIABLE, ParentTest, configuration
from streamalloc.driver.processes import address_space_limit, for_children, imex_channels
from streamalloc.driver.protocol import MemoryListener
from streamalloc.driver.reports import LIBRARIES, Stack, described, here, line_of, lines, place_of
from streamalloc.driver.selection import as_asked, choice_of, default_of_threads, default_or_simulated, read_choice
from streamalloc.driver.wrappers import Wrapper

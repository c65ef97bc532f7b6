"""Multicast objects (``cuMulticastCreate``), and the bindings of devices' memory to them (``cuMulticastBindMem``)."""

"""Kernels as Python functions: :mod:`.registry` has the functions, :mod:`.calls` the driver calls that launch them.

Images of modules are accepted without being run. Of PTX, :mod:`.modules` reads the names and parameters of kernels and
globals; of all other formats nothing is read.
"""

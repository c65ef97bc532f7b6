"""Kernels as Python functions: :mod:`.registry` has the functions, :mod:`.calls` the driver calls that launch them.

Module images are accepted and not executed. :mod:`.modules` reads kernel names, kernel parameters and globals from PTX,
and nothing from other formats.
"""

"""Functions of the simulated driver, one module for each area. :class:`~streamalloc.simulator.driver.SimulatedMachine`
combines their classes.
"""

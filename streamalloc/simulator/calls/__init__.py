"""Functions of the driver, one module for each area. :class:`~..driver.SimulatedDriver` combines their classes."""

"""The driver calls, one module per area. :class:`~..driver.SimulatedDriver` combines them."""

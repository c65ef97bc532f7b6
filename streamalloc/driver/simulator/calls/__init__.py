"""The driver calls, one module for each area; :class:`~..driver.SimulatedDriver` puts them together."""

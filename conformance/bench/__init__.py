"""The kernels' times beside what the machine allows: `python -m conformance.bench`."""

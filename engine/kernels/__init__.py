"""The CUDA kernels of cuda/ as Python functions: one file a stem, each with the names and arguments of ref."""

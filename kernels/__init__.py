"""The arithmetic: packed weights, the op table and its thread team, and the kernels for each processor."""

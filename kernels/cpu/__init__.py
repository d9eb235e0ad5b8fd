"""Kernels for CPUs: vector code emitted through llvmlite inside loops compiled by Numba."""

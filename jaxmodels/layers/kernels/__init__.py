"""Attention on one kind of processor each; jaxmodels/layers/attention.py picks."""

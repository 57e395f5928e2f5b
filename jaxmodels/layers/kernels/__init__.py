"""Attention for one kind of processor each, with the scale already in the queries; layers/attention.py picks."""

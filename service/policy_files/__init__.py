"""A policy's files on their way to other machines: which of them go, what their content is called, where it is kept."""

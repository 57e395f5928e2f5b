"""Checkpoint files, independent of policies: safetensors, JSON, Orbax, vision backbones."""

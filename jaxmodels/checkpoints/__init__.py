"""Checkpoint files that know no model: safetensors, JSON, Orbax, vision backbones."""

"""Arrays over HTTP: JSON, npz or msgpack in and out, nothing but numbers of the allowed kinds and sizes."""

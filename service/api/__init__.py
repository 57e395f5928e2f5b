"""HTTP API: routes that parse, call and render."""

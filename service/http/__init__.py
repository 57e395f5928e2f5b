"""HTTP for all doors: protocol deadlines, limits, strict JSON, arrays, origins."""

"""HTTP for the API, the rooms, streams and the dashboard: protocol deadlines, limits, strict JSON, arrays, origins."""

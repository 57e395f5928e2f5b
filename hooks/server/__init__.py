"""Webhooks server in one line: ports, threads, the end of a script, a landing page, a tunnel."""

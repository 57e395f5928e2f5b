"""The server: sessions, rooms, the control loop."""

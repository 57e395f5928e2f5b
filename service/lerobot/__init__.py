"""Wire formats of LeRobot's gRPC service for robots, ``lerobot.async_inference``."""

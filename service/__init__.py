"""Server of robot policies: sessions, rooms, control loop, inference, rollout."""

"""Client of a transport server: a session's rooms, and the robot's side of them."""

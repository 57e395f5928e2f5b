"""WebRTC: peer connections, received and sent video."""

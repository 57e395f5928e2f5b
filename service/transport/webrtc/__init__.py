"""WebRTC: peer connections, video in and out; knows no rooms."""

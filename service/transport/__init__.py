"""Transport: rooms in which frames and joints come in and commands go out."""

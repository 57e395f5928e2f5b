"""The policies there are: each folder is one policy type, and its name is the registry name."""

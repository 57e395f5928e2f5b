"""Between the network and the app: connections, deadlines, addresses and folders that are allowed."""

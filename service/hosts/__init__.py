"""One server over several hosts: its policies are spread over the devices of all of them."""

"""What travels between a store and its clients, and how: the bytes, and the sockets that carry them."""

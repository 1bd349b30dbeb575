"""The way to several stores that share the keys between them."""

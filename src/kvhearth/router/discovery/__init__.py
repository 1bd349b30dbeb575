"""Where the router learns which engines there are: named ones, a file, DNS."""

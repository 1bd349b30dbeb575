"""The process that serves: connections, commands, who may do what, and the way between the tiers."""

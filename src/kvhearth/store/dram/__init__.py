"""The DRAM tier: the table of values, and the parts that it is made of."""

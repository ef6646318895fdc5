"""The benches under test: that they measure what they say, on sizes that take no time."""

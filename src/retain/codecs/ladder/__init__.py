"""The ladder: lossy codec of four levels that nest in one object."""

"""A folder that is removed again, whatever ends the work in it."""

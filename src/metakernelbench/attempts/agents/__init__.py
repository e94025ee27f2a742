"""Who does the work in an attempt: a real model through Harbor's agent, or prepared turns that stand in for one."""

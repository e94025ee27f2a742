"""Files that live in the sandbox. They run there alone: standard library only, nothing of this package."""

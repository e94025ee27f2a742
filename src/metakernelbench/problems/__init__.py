"""The catalogue: 74 fused subgraphs in six families, one self-contained module a problem."""

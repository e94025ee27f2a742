"""Problems of the family mlp_norm."""

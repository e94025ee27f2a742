"""Problems of the family linear_attention."""

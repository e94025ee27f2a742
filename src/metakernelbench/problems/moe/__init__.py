"""Problems of the family moe."""

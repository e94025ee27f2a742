"""Problems of the family attention."""

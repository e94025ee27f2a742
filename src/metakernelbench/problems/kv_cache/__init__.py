"""Problems of the family kv_cache."""

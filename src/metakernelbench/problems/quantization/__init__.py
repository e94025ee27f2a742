"""Problems of the family quantization."""

"""Number formats and layouts that several problems share."""

"""io_manager."""

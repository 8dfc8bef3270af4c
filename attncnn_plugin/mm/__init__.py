"""What changes mmengine, by the import of a module of its own."""

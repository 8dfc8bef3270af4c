"""Glue to mmengine's private functions, the loader of checkpoint files, and the frameworks that are installed."""

"""A page for the browser that shows where every head attends to, of any pixel."""

from .page import explorer_page

__all__ = ['explorer_page']

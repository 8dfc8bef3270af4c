"""A page for the browser that shows where every head looks, from any pixel."""

from .page import explorer_page

__all__ = ['explorer_page']

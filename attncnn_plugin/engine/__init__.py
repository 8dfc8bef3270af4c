"""What runs beside mmengine's training loop."""

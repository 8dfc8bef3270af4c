"""What is for mmpretrain and mmengine."""

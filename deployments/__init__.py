"""What brings a Prefect server up."""

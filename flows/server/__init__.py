"""What a Prefect server of ours runs: its application, who may ask it, and where its garbage is collected."""

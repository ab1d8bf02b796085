"""Prefect servers, workers and deployments for our flows."""

"""Spans of flow runs, by OpenTelemetry's conventions, where an OTLP endpoint is set."""
